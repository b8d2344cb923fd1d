// Attention of few queries over keys and values of up to `room` slots. With AMX, scores are the products of tiles.
#include <cmath>

namespace {

constexpr float HIDDEN = -1e30f;  // a slot is hidden where its mask is below
constexpr int QUERIES = 16;       // queries in a block; scores are stored as [slots, QUERIES]
constexpr int64_t SMALL = 1 << 17;  // numbers of masks that one thread looks at
constexpr int TOGETHER = 6;       // queries whose sums fit into registers

// e^x for x <= 0, relative error below 2^-22; 0 below -87. (Cephes' expf polynomial.)
inline __m512 exponential(__m512 x) {
  const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  constexpr float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1, 1};
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
#pragma GCC unroll 8
  for (float term : terms) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  return _mm512_maskz_scalef_ps(_mm512_knot(zero), p, n);
}

// Query times key for `count` queries and every slot, into score [slots, QUERIES]. A score is a sum over the width alone,
// in one order. left: room for the queries as they are multiplied.
void scores(const Bits* query, const Bits* keys, float* left, float* score, int64_t count, int64_t slots, int64_t width) {
#ifdef SELFSPEC_TILES
  Bits* of = reinterpret_cast<Bits*>(left);
  spread_tiles(query, of, count, width);
  for (int64_t s = 0; s < slots; s += TILE) tiles<1>(of, keys + s * width, score + s * QUERIES, width, false);
#else
  alignas(64) float block[WIDE * WIDE];
  for (int64_t m = 0; m < count; m += WIDE) {
    const int each = count - m < WIDE ? count - m : WIDE;
    spread(query + m * width, left, each, width);
    for (int64_t s = 0; s < slots; s += WIDE) {
      const Bits* right = keys + s * width;
      switch (each) {
        case 1: _mm512_store_ps(block, products<1, WIDE, false>(left, right, width)); break;
        case 2: _mm512_store_ps(block, products<2, WIDE, false>(left, right, width)); break;
        case 3: _mm512_store_ps(block, products<3, WIDE, false>(left, right, width)); break;
        default: _mm512_store_ps(block, products<4, WIDE, false>(left, right, width));
      }
      for (int i = 0; i < each; i++)
        for (int n = 0; n < WIDE; n++) score[(s + n) * QUERIES + m + i] = block[i * WIDE + n];
    }
  }
#endif
}

// Scores to weights, and their sums over slots; mask: of each of `count` queries. A hidden slot's weight is exactly zero
// and slots are added one after another, so a sum does not depend on where the slots that are seen lie.
__m512 weights(float* score, const Bits* const* mask, int64_t count, int64_t slots, float scale) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (int64_t s = 0; s < slots; s += 16) {
    __m512i of[16], any = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int m = 0; m < 16; m++) {
      of[m] = m < count ? _mm512_castps_si512(float_of(mask[m] + s)) : _mm512_setzero_si512();
      any = _mm512_or_si512(any, of[m]);
    }
    const bool all_seen = _mm512_test_epi32_mask(any, any) == 0;
    if (!all_seen) transpose(of);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      float* at = score + (s + i) * QUERIES;
      const __m512 more = all_seen ? _mm512_setzero_ps() : _mm512_castsi512_ps(of[i]);
      const __m512 whole = _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_set1_ps(scale), more);
      _mm512_store_ps(at, whole);
      most = _mm512_max_ps(most, whole);
    }
  }
  __m512 total = _mm512_setzero_ps();
  for (int64_t s = 0; s < slots; s++) {
    const __m512 weight = exponential(_mm512_sub_ps(_mm512_load_ps(score + s * QUERIES), most));
    _mm512_store_ps(score + s * QUERIES, weight);
    total = _mm512_add_ps(total, weight);
  }
  return total;
}

// Values of 32 x V dimensions, weighted, for M queries; slots are added one after another.
template <int M, int V>
void weighted(const float* weight, const Bits* values, const float* totals, Bits* const* out, int64_t slots, int64_t width) {
  __m512 even[M][V], odd[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) even[m][v] = odd[m][v] = _mm512_setzero_ps();
  for (int64_t s = 0; s < slots; s++) {
    __m512 first[V], second[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const __m512i pairs = _mm512_loadu_si512(values + s * width + STEP * v);
      first[v] = lower(pairs);
      second[v] = upper(pairs);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const __m512 by = _mm512_set1_ps(weight[s * QUERIES + m]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        even[m][v] = _mm512_fmadd_ps(by, first[v], even[m][v]);
        odd[m][v] = _mm512_fmadd_ps(by, second[v], odd[m][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const __m512 total = _mm512_set1_ps(totals[m]);
      const __m512i low = _mm512_cvtepu16_epi32(rounded(_mm512_div_ps(even[m][v], total)));
      const __m512i high = _mm512_cvtepu16_epi32(rounded(_mm512_div_ps(odd[m][v], total)));
      _mm512_storeu_si512(out[m] + STEP * v, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

template <int V>
void weighted_rows(int64_t count, const float* weight, const Bits* values, const float* totals, Bits* const* out,
                   int64_t slots, int64_t width) {
  switch (count) {
    case 1: weighted<1, V>(weight, values, totals, out, slots, width); break;
    case 2: weighted<2, V>(weight, values, totals, out, slots, width); break;
    case 3: weighted<3, V>(weight, values, totals, out, slots, width); break;
    case 4: weighted<4, V>(weight, values, totals, out, slots, width); break;
    case 5: weighted<5, V>(weight, values, totals, out, slots, width); break;
    default: weighted<6, V>(weight, values, totals, out, slots, width);
  }
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
    while (s > 0 && !_mm512_cmp_ps_mask(float_of(mask + i * room + s - 16), _mm512_set1_ps(HIDDEN), _CMP_NLT_UQ)) s -= 16;
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
      _mm512_store_ps(totals, weights(score, marks, count, slots, scale));
      for (int64_t m = 0; m < count; m += TOGETHER)
        for (int64_t d = 0; d < width;) {
          Bits* places[TOGETHER];
          const int64_t each = count - m < TOGETHER ? count - m : TOGETHER, vectors = width - d < 2 * STEP ? 1 : 2;
          for (int64_t j = 0; j < each; j++) places[j] = to[m + j] + d;
          if (vectors == 1)
            weighted_rows<1>(each, score + m, v + d, totals + m, places, slots, width);
          else
            weighted_rows<2>(each, score + m, v + d, totals + m, places, slots, width);
          d += vectors * STEP;
        }
    }
#ifdef SELFSPEC_TILES
    end_tiles();
#endif
  }
}
