// Attention of few queries over keys and values of up to `room` slots. With AMX, scores are the products of tiles.
#include <cmath>

namespace {

constexpr float HIDDEN = -1e30f;  // a slot is hidden where its mask is below
constexpr int QUERIES = 16;       // queries in a block; scores are stored as [slots, QUERIES]
constexpr int64_t SMALL = 1 << 17;  // numbers of masks that one thread looks at
#ifdef SELFSPEC_AVX512
constexpr int TOGETHER = 6, SPAN = 2;  // queries, and vectors of values, whose sums fit into registers
#else
constexpr int TOGETHER = 3, SPAN = 1;
#endif

// e^x for x <= 0, relative error below 2^-22; 0 below -87. (Cephes' expf polynomial.)
inline Floats exponential(Floats given) {
  const Floats x = larger(all(-87.0f), given);  // of two, the second where one is NaN
  const Floats n = whole(multiply(x, all(1.44269504f)));
  Floats r = fnmadd(n, all(0.693359375f), x);
  r = fnmadd(n, all(-2.12194440e-4f), r);
  constexpr float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1, 1};
  Floats p = all(1.9875691500e-4f);
#pragma GCC unroll 8
  for (float term : terms) p = fmadd(p, r, all(term));
  return scaled(p, n, given, -87.0f);
}

// Query times key for `count` queries and every slot, into score [slots, QUERIES]. A score is a sum over the width alone,
// in one order. left: room for the queries as they are multiplied.
void scores(const Bits* query, const Bits* keys, float* left, float* score, int64_t count, int64_t slots, int64_t width) {
#ifdef SELFSPEC_TILES
  Bits* of = reinterpret_cast<Bits*>(left);
  spread_tiles(query, of, count, width);
  for (int64_t s = 0; s < slots; s += TILE) tiles<1>(of, keys + s * width, score + s * QUERIES, width, false);
#else
  Left* of = reinterpret_cast<Left*>(left);
  alignas(64) float block[WIDE * WIDE];
  for (int64_t m = 0; m < count; m += WIDE) {
    const int each = count - m < WIDE ? count - m : WIDE;
    spread(query + m * width, of, each, width);
    for (int64_t s = 0; s < slots; s += WIDE) {
      const Bits* right = keys + s * width;
      switch (each) {
        case 1: store(block, products<1, WIDE, false>(of, right, width)); break;
        case 2: store(block, products<2, WIDE, false>(of, right, width)); break;
        case 3: store(block, products<3, WIDE, false>(of, right, width)); break;
        default: store(block, products<4, WIDE, false>(of, right, width));
      }
      for (int i = 0; i < each; i++)
        for (int n = 0; n < WIDE; n++) score[(s + n) * QUERIES + m + i] = block[i * WIDE + n];
    }
  }
#endif
}

// Scores to weights, and their sums over slots; mask: of each of `count` queries. A hidden slot's weight is exactly zero
// and slots are added one after another, so a sum does not depend on where the slots that are seen lie.
Floats weights(float* score, const Bits* const* mask, int64_t count, int64_t slots, float scale) {
  Floats most = all(-INFINITY);
  for (int64_t s = 0; s < slots; s += 16) {
    const Ints none = as_ints(zeros());
    Ints of[16], any = none;
#pragma GCC unroll 16
    for (int m = 0; m < 16; m++) {
      of[m] = m < count ? as_ints(float_of(mask[m] + s)) : none;
      any = any_of(any, of[m]);
    }
    const bool all_seen = is_zero(any);
    if (!all_seen) transpose(of);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      float* at = score + (s + i) * QUERIES;
      const Floats more = all_seen ? zeros() : as_floats(of[i]);
      const Floats whole = fmadd(load(at), all(scale), more);
      store(at, whole);
      most = larger(most, whole);
    }
  }
  Floats total = zeros();
  for (int64_t s = 0; s < slots; s++) {
    const Floats weight = exponential(subtract(load(score + s * QUERIES), most));
    store(score + s * QUERIES, weight);
    total = add(total, weight);
  }
  return total;
}

// Values of 32 x V dimensions, weighted, for M queries; slots are added one after another.
template <int M, int V>
void weighted(const float* weight, const Bits* values, const float* totals, Bits* const* out, int64_t slots, int64_t width) {
  Floats even[M][V], odd[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) even[m][v] = odd[m][v] = zeros();
  for (int64_t s = 0; s < slots; s++) {
    Floats first[V], second[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const Ints pairs = pairs_at(values + s * width + STEP * v);
      first[v] = lower(pairs);
      second[v] = upper(pairs);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const Floats by = all(weight[s * QUERIES + m]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        even[m][v] = fmadd(by, first[v], even[m][v]);
        odd[m][v] = fmadd(by, second[v], odd[m][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const Floats total = all(totals[m]);
      store_pairs(out[m] + STEP * v, divide(even[m][v], total), divide(odd[m][v], total));
    }
}

template <int V, int M = TOGETHER>
void weighted_rows(int64_t count, const float* weight, const Bits* values, const float* totals, Bits* const* out,
                   int64_t slots, int64_t width) {
  if constexpr (M > 1)
    if (count < M) return weighted_rows<V, M - 1>(count, weight, values, totals, out, slots, width);
  weighted<M, V>(weight, values, totals, out, slots, width);
}

}  // namespace

// query [rows, heads, nodes, width]; keys and values [rows, heads / shared, room, width], where a head begins `apart` slots
// behind the one before it; mask, added to the scores, [rows or 1, 1, nodes, room]; out [rows, nodes, heads, width]. room is
// a multiple of 16, width of STEP.
extern "C" void kernel(const Bits* query, const Bits* keys, const Bits* values, const Bits* mask, Bits* out, int64_t rows,
                       int64_t heads, int64_t shared, int64_t nodes, int64_t room, int64_t width, int64_t masks,
                       int64_t apart, float scale) {
  std::vector<int64_t> seen(masks * nodes);  // slots up to the last one that a node sees
#pragma omp parallel for schedule(static) if (masks * nodes * room > SMALL)
  for (int64_t i = 0; i < masks * nodes; i++) {
    int64_t s = room;
    while (s > 0 && !any_not_below(float_of(mask + i * room + s - 16), HIDDEN)) s -= 16;
    seen[i] = s;
  }
  const int64_t all = shared * nodes, blocks = (all + QUERIES - 1) / QUERIES;  // queries that share keys, and blocks of them
#pragma omp parallel
  {
    static thread_local Scratch scratch;
    float* score = scratch.of(QUERIES * (room + width));
    float* left = score + QUERIES * room;
#ifdef SELFSPEC_TILES
    begin_tiles();
#endif
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * heads / shared * blocks; i++) {
      const int64_t q = i % blocks * QUERIES, head = i / blocks, b = head * shared / heads, of = masks == 1 ? 0 : b;
      const int64_t count = all - q < QUERIES ? all - q : QUERIES;
      const Bits *k = keys + head * apart * width, *v = values + head * apart * width, *marks[QUERIES];
      Bits* to[QUERIES];
      int64_t slots = 0;
      for (int64_t m = 0; m < count; m++) {
        const int64_t n = (q + m) % nodes, of_head = head * shared % heads + (q + m) / nodes;
        marks[m] = mask + (of * nodes + n) * room;
        to[m] = out + ((b * nodes + n) * heads + of_head) * width;
        slots = slots < seen[of * nodes + n] ? seen[of * nodes + n] : slots;
      }
      if (!slots) slots = room;
      scores(query + (head * all + q) * width, k, left, score, count, slots, width);
      alignas(64) float totals[QUERIES];
      store(totals, weights(score, marks, count, slots, scale));
      for (int64_t m = 0; m < count; m += TOGETHER)
        for (int64_t d = 0; d < width;) {
          Bits* places[TOGETHER];
          const int64_t each = count - m < TOGETHER ? count - m : TOGETHER, vectors = width - d < SPAN * STEP ? 1 : SPAN;
          for (int64_t j = 0; j < each; j++) places[j] = to[m + j] + d;
          if (vectors == 1)
            weighted_rows<1>(each, score + m, v + d, totals + m, places, slots, width);
          else
            weighted_rows<SPAN>(each, score + m, v + d, totals + m, places, slots, width);
          d += vectors * STEP;
        }
    }
#ifdef SELFSPEC_TILES
    end_tiles();
#endif
  }
}
