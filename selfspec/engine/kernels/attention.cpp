// Attention of few queries over keys and values of up to `slots` slots.
#include <cmath>

namespace {

constexpr float HIDDEN = -1e30f;  // a slot is hidden where its mask is below

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

// M queries of one head. Sums over slots go slot by slot, and hidden slots add exact zeros: a query's result depends on
// what it sees alone, not on where it lies, on the queries beside it or on the size of the buffers. slots: those that some
// query sees, of `room`.
template <int M>
void attend(const Bits* query, const Bits* keys, const Bits* values, const Bits* mask, Bits* out, int64_t out_apart,
            int64_t slots, int64_t room, int64_t width, float scale) {
  static thread_local Scratch scratch;
  float* left = scratch.of(M * width + M * slots);
  float* weight = left + M * width;  // [M, slots]
  spread(query, left, M, width);
  alignas(64) float found[WIDE * WIDE];
  for (int64_t s = 0; s < slots; s += WIDE) {
    _mm512_store_ps(found, products<M, WIDE, false>(left, keys + s * width, width));
    for (int m = 0; m < M; m++) std::memcpy(weight + m * slots + s, found + m * WIDE, WIDE * sizeof(float));
  }
  for (int m = 0; m < M; m++) {
    float* row = weight + m * slots;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t s = 0; s < slots; s += 16) {
      const __m512 score = _mm512_fmadd_ps(_mm512_load_ps(row + s), _mm512_set1_ps(scale), float_of(mask + m * room + s));
      _mm512_store_ps(row + s, score);
      most = _mm512_max_ps(most, score);
    }
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t s = 0; s < slots; s += 16)
      _mm512_store_ps(row + s, exponential(_mm512_sub_ps(_mm512_load_ps(row + s), most)));
  }
  for (int64_t k = 0; k < width; k += STEP) {
    __m512 even[M], odd[M], total[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) even[m] = odd[m] = total[m] = _mm512_setzero_ps();
    for (int64_t s = 0; s < slots; s++) {
      const __m512i pairs = _mm512_loadu_si512(values + s * width + k);
      const __m512 first = lower(pairs), second = upper(pairs);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const __m512 by = _mm512_set1_ps(weight[m * slots + s]);
        even[m] = _mm512_fmadd_ps(by, first, even[m]);
        odd[m] = _mm512_fmadd_ps(by, second, odd[m]);
        total[m] = _mm512_add_ps(total[m], by);
      }
    }
    for (int m = 0; m < M; m++) {
      const __m512i low = _mm512_cvtepu16_epi32(rounded(_mm512_div_ps(even[m], total[m])));
      const __m512i high = _mm512_cvtepu16_epi32(rounded(_mm512_div_ps(odd[m], total[m])));
      _mm512_storeu_si512(out + m * out_apart + k, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

}  // namespace

// query [rows, heads, nodes, width]; keys and values [rows, heads / shared, room, width]; mask, added to the scores, [rows
// or 1, 1, nodes, room]; out [rows, nodes, heads, width]. room is a multiple of 16, width of STEP.
extern "C" void kernel(const Bits* query, const Bits* keys, const Bits* values, const Bits* mask, Bits* out, int64_t rows,
                       int64_t heads, int64_t shared, int64_t nodes, int64_t room, int64_t width, int64_t masks,
                       float scale) {
  const int64_t blocks = (nodes + WIDE - 1) / WIDE;
  std::vector<int64_t> seen(masks);  // slots up to the last one that some query sees
  for (int64_t i = 0; i < masks * nodes; i++) {
    int64_t s = room, &most = seen[i / nodes];
    while (s > most && _mm512_reduce_max_ps(float_of(mask + i * room + s - 16)) < HIDDEN) s -= 16;
    most = s;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows * heads * blocks; i++) {
    const int64_t n = i % blocks * WIDE, head = i / blocks, b = head / heads, of = masks == 1 ? 0 : b;
    const Bits* q = query + (head * nodes + n) * width;
    const Bits *k = keys + head / shared * room * width, *v = values + head / shared * room * width;
    const Bits* m = mask + (of * nodes + n) * room;
    Bits* to = out + ((b * nodes + n) * heads + head % heads) * width;
    const int64_t slots = seen[of] ? seen[of] : room, apart = heads * width;
    switch (nodes - n) {
      case 1: attend<1>(q, k, v, m, to, apart, slots, room, width, scale); break;
      case 2: attend<2>(q, k, v, m, to, apart, slots, room, width, scale); break;
      case 3: attend<3>(q, k, v, m, to, apart, slots, room, width, scale); break;
      default: attend<4>(q, k, v, m, to, apart, slots, room, width, scale);
    }
  }
}
