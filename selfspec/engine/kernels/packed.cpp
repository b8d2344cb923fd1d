// out = left weight^T (+ bias) for few rows, over weights that were laid out in panels (see fastest.py).
namespace {

#ifdef SELFSPEC_AVX512
constexpr int VECTORS = 3;              // vectors of outputs in a panel
constexpr int ROWS = 8;                 // rows in a block: ROWS * VECTORS sums fit into registers
#else
constexpr int VECTORS = 1, ROWS = 4;  // more rows are slower: sums leave their registers
#endif
constexpr int OUTPUTS = 16 * VECTORS;   // outputs of a panel
constexpr int64_t SMALL = 1 << 15;      // products that one thread does
constexpr int NEAR = 1024;              // bytes ahead of what is read, fetched into the nearest cache

// M rows times a panel of V vectors. An output's products are added in float32 in the order of the inputs, one after
// another or pair after pair, so that its bits depend neither on M nor on V. Meanwhile lines from `next` on are fetched,
// `step` bytes for every pair of inputs: the panel that comes after this one.
template <int M, int V>
void block(const Left* left, const Bits* weight, const Bits* bias, Bits* out, int64_t width, int64_t stride,
           const char* next, int64_t step) {
  Floats sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) sum[m][v] = zeros();
  const char* until = next;
  for (int64_t k = 0; k < width; k += 2, weight += 32 * V) {
    Ints pairs[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) {
      pairs[v] = pairs_at(weight + 32 * v);
      _mm_prefetch(reinterpret_cast<const char*>(weight + 32 * v) + NEAR * V, _MM_HINT_T0);
    }
    for (until += step; next < until; next += 64) _mm_prefetch(next, _MM_HINT_T1);
#ifdef SELFSPEC_PAIRS
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Ints by = all(left + m * width + k);
#pragma GCC unroll 3
      for (int v = 0; v < V; v++) sum[m][v] = fmadd(pairs[v], by, sum[m][v]);
    }
#else
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Floats by = all(left[m * width + k]);
#pragma GCC unroll 3
      for (int v = 0; v < V; v++) sum[m][v] = fmadd(lower(pairs[v]), by, sum[m][v]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Floats by = all(left[m * width + k + 1]);
#pragma GCC unroll 3
      for (int v = 0; v < V; v++) sum[m][v] = fmadd(upper(pairs[v]), by, sum[m][v]);
    }
#endif
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) {
      const Floats whole = bias ? add(sum[m][v], float_of(bias + 16 * v)) : sum[m][v];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * stride + 16 * v), rounded(whole));
    }
}

template <int V, int M = ROWS>
void rows(int64_t count, const Left* left, const Bits* weight, const Bits* bias, Bits* out, int64_t width,
          int64_t stride, const char* next, int64_t step) {
  if constexpr (M > 1)
    if (count < M) return rows<V, M - 1>(count, left, weight, bias, out, width, stride, next, step);
  block<M, V>(left, weight, bias, out, width, stride, next, step);
}

}  // namespace

// left [count, width]; weight: panels of OUTPUTS outputs, of each first the pairs of inputs, then the outputs, then the
// two of a pair, and a last panel of what is left, in vectors of 16; bias [outputs] where biased; out [count, outputs].
// width is a multiple of 32, outputs of 16.
extern "C" void kernel(const Bits* left, const Bits* weight, const Bits* bias, Bits* out, int64_t count, int64_t width,
                       int64_t outputs, int64_t biased) {
#ifdef SELFSPEC_PAIRS
  const Left* of_rows = left;
#else
  static thread_local Scratch scratch;
  float* of_rows = scratch.of(count * width);
  for (int64_t i = 0; i < count * width; i += 16) store(of_rows + i, float_of(left + i));
#endif
  const int64_t panels = (outputs + OUTPUTS - 1) / OUTPUTS, groups = (count + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) if (count * outputs * width > SMALL)
  for (int64_t p = 0; p < panels; p++) {
    const int64_t n = p * OUTPUTS, vectors = outputs - n < OUTPUTS ? (outputs - n) / 16 : VECTORS;
    const Bits *from = weight + n * width, *more = biased ? bias + n : nullptr;
    const int64_t step = 64 * vectors / groups;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t m = count * g / groups, each = count * (g + 1) / groups - m;
      const char* next = reinterpret_cast<const char*>(from + 16 * vectors * width) + g * step * (width / 2);
      const Left* of = of_rows + m * width;
      Bits* to = out + m * outputs + n;
      if (vectors == VECTORS)
        rows<VECTORS>(each, of, from, more, to, width, outputs, next, step);
      else if constexpr (VECTORS > 1)  // the last panel
        vectors > 1 ? rows<2>(each, of, from, more, to, width, outputs, next, step)
                    : rows<1>(each, of, from, more, to, width, outputs, next, step);
    }
  }
}
