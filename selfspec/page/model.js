// What speculative decoding brings. The same formulas, in the same order of operations, as tests/predicted.py
// and static_tree in selfspec/drafters/parts/static_tree.py; tests/test_page.py holds them together.

const MOST = 64;

/** Path probabilities of the best static tree, in the order of its growth.
 * @param {number[][]} acceptance by depth and rank @param {number} nodes @returns {number[]} */
function staticTree(acceptance, nodes) {
  acceptance = acceptance.map((row) => [...row].sort((a, b) => b - a));
  const probs = [1];
  const depths = [0];
  /** @type {[number, number, number][]} probability, parent, rank */
  const frontier = acceptance.length && acceptance[0].length ? [[acceptance[0][0], 0, 0]] : [];
  while (frontier.length && probs.length < nodes) {
    let best = 0;
    for (let i = 1; i < frontier.length; i++) if (frontier[i][0] > frontier[best][0]) best = i;
    const [value, parent, rank] = frontier.splice(best, 1)[0];
    if (value <= 0) break;
    const depth = depths[parent] + 1;
    probs.push(value);
    depths.push(depth);
    const level = acceptance[depth - 1];
    if (rank + 1 < level.length) frontier.push([probs[parent] * level[rank + 1], parent, rank + 1]);
    if (depth < acceptance.length && acceptance[depth].length) {
      frontier.push([value * acceptance[depth][0], probs.length - 1, 0]);
    }
  }
  return probs;
}

/** @param {number} tau @param {number} step @param {number} cost @param {number} draft */
function speedup(tau, step, cost, draft) {
  return (tau * step) / (cost + draft);
}

/** @param {number} nodes @param {Curve} curve */
function fastest(nodes, curve) {
  return Math.max(curve.size / curve.bandwidth, (nodes * curve.products) / curve.peak);
}

/** @param {number[]} seconds @returns {number[]} */
function monotone(seconds) {
  /** @type {[number, number][]} */
  const blocks = [];
  for (const value of seconds) {
    blocks.push([value, 1]);
    while (blocks.length > 1 && blocks[blocks.length - 2][0] >= blocks[blocks.length - 1][0]) {
      const [b, n] = /** @type {[number, number]} */ (blocks.pop());
      const [a, m] = /** @type {[number, number]} */ (blocks.pop());
      blocks.push([(a * m + b * n) / (m + n), m + n]);
    }
  }
  return blocks.flatMap(([mean, count]) => Array(count).fill(mean));
}

/** @typedef {{sizes: number[], seconds: number[], size: number, products: number, bandwidth: number, peak: number}} Curve */

/** Seconds of a pass over so many nodes. @param {Curve} curve @param {number} nodes */
function passCost(curve, nodes) {
  const smooth = monotone(curve.seconds);
  const least = nodes > curve.sizes[curve.sizes.length - 1] ? fastest(nodes, curve) : 0;
  if (smooth.length === 1) return Math.max(smooth[0], least);
  let above = curve.sizes.findIndex((n, i) => n >= nodes && i > 0);
  if (above < 0) above = smooth.length - 1;
  const [n, m] = [curve.sizes[above - 1], curve.sizes[above]];
  const [low, high] = [smooth[above - 1], smooth[above]];
  return Math.max(low + ((high - low) * (nodes - n)) / (m - n), least);
}

/** @param {number[][]} acceptance @param {Curve} curve @param {number} draft @param {number} nodes @param {number} rows
 * @param {number} masks mask rows beside each node */
function predict(acceptance, curve, draft, nodes, rows = 1, masks = 0) {
  const grown = [];
  let total = 0;
  for (const p of staticTree(acceptance, MOST)) grown.push((total += p));
  const step = passCost(curve, rows);
  const each = rows * (1 + masks);
  const taus = [];
  const ratios = [];
  for (let n = 1; n <= MOST; n++) {
    taus.push(grown[Math.min(n, grown.length) - 1]);
    ratios.push(n === 1 ? 1 : speedup(taus[n - 1], step, passCost(curve, each * n), draft * step));
  }
  const tau = taus[nodes - 1];
  const cost = passCost(curve, each * nodes);
  const most = Math.max(...ratios);
  let pays = 1;
  ratios.forEach((ratio, i) => {
    if (ratio > 1) pays = i + 1;
  });
  return {
    tau,
    speedup: ratios[nodes - 1],
    free: speedup(tau, step, cost, 0),
    limit: speedup(tau, step, fastest(each * nodes, curve), 0),
    best: ratios.indexOf(most) + 1,
    most,
    pays,
    affordable: tau - cost / step,
    taus,
    ratios,
  };
}

/** @param {number[]} first @param {number} rest @param {number} choices */
function assumed(first, rest, choices = 8) {
  return first.map((p) => Array.from({ length: choices }, (_, rank) => p * (rest * (1 - p)) ** rank));
}
