// out = left weight^T (+ bias) over weights in 8 bits, one scale for every 32 inputs of an output (see int8.py).
#include <limits>

namespace {

constexpr int GROUP = 32;               // inputs that share a scale
constexpr int LANES = 16;               // outputs of a panel
#ifdef SELFSPEC_AVX512
constexpr int VECTORS = 3;              // panels that are multiplied together
constexpr int ROWS = 8;                 // rows in a block: ROWS * VECTORS sums fit into registers
#else
constexpr int VECTORS = 1, ROWS = 4;
#endif
constexpr int BAND = 32;                // rows over which a group of weights is read once
constexpr int NEAR = 2 * GROUP * LANES;  // bytes ahead of what is read, fetched into the nearest cache
constexpr int64_t SMALL = 1 << 15;      // products that one thread does

#ifdef SELFSPEC_AVX512

// Groups of a row in 8 bits with their scales; offset: what the products have too much, since weights are stored as
// w + 128.
void quantize(const Bits* row, int64_t width, int8_t* to, float* scale, int32_t* offset) {
  for (int64_t k = 0; k < width; k += GROUP) {
    const __m512 a = float_of(row + k), b = float_of(row + k + 16);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const __m512 factor = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), q = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtsepi32_epi8(p));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k + 16), _mm512_cvtsepi32_epi8(q));
    const bool nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    *scale++ = nan ? std::numeric_limits<float>::quiet_NaN() : largest / 127;
    *offset++ = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(p, q));
  }
}

// sum += weights * inputs, four of each to a sum. Written out, since gcc 12 copies what its intrinsic adds to.
inline void add(Ints& sum, Ints weights, Ints inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
}

inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints bytes_at(const uint8_t* at) { return _mm512_loadu_si512(at); }

#else

// As above. Signs of weights are moved to the inputs, so that nothing is too much.
void quantize(const Bits* row, int64_t width, int8_t* to, float* scale, int32_t* offset) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int64_t k = 0; k < width; k += GROUP) {
    const Floats a = float_of(row + k), b = float_of(row + k + 16);
    const auto larger_of = [sign](__m256 x, __m256 y) {
      return _mm256_max_ps(_mm256_andnot_ps(sign, x), _mm256_andnot_ps(sign, y));
    };
    alignas(32) float most[8];
    _mm256_store_ps(most, larger_of(larger_of(a.a, a.b), larger_of(b.a, b.b)));
    float largest = 0;
    for (float each : most) largest = each > largest ? each : largest;
    const __m256 factor = _mm256_set1_ps(largest > 0 ? 127 / largest : 0);
    const auto whole_of = [factor](__m256 x) { return _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)); };
    const __m256i p = _mm256_packs_epi32(whole_of(a.a), whole_of(a.b)), q = _mm256_packs_epi32(whole_of(b.a), whole_of(b.b));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(p, q), order));
    const auto unordered = [](__m256 x, __m256 y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)); };
    const bool nan = unordered(a.a, a.b) || unordered(b.a, b.b);
    *scale++ = nan ? std::numeric_limits<float>::quiet_NaN() : largest / 127;
    *offset++ = 0;
  }
}

inline void add(Ints& sum, Ints weights, Ints inputs) {
  const auto half = [](__m256i sum, __m256i weights, __m256i inputs) {
    const __m256i of = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));  // without the 128 that is added to it
    const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(of), _mm256_sign_epi8(inputs, of));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
  };
  sum = {half(sum.a, weights.a, inputs.a), half(sum.b, weights.b, inputs.b)};
}
inline Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints bytes_at(const uint8_t* at) { return {half_at(at), half_at(at + 32)}; }

#endif

// One group of M rows times V panels, added to sums [M, V]. A group's products are added up in integers, groups in
// their order: an output's bits depend neither on M nor on V.
template <int M, int V>
inline void group(const int8_t* left, int64_t width, const float* scale, const int32_t* offset, int64_t groups,
                  const uint8_t* weight, const Bits* weight_scales, float* sums) {
  Ints sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) sum[m][v] = all_ints(offset[m * groups]);
#pragma GCC unroll 1  // unrolled, sums leave their registers
  for (int k = 0; k < GROUP; k += 4) {
    Ints of[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) of[v] = bytes_at(weight + v * width * LANES + k * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      int32_t quad;
      std::memcpy(&quad, left + m * width + k, 4);
      const Ints inputs = all_ints(quad);
#pragma GCC unroll 3
      for (int v = 0; v < V; v++) add(sum[m][v], of[v], inputs);
    }
  }
  Floats scales[V];
#pragma GCC unroll 3
  for (int v = 0; v < V; v++) scales[v] = float_of(weight_scales + v * groups * LANES);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) {
      float* to = sums + (m * V + v) * LANES;
      const Floats factor = multiply(scales[v], all(scale[m * groups]));
      store(to, fmadd(float_of(sum[m][v]), factor, load(to)));
    }
}

template <int V, int M = ROWS>
void group_rows(int64_t count, const int8_t* left, int64_t width, const float* scale, const int32_t* offset,
                int64_t groups, const uint8_t* weight, const Bits* weight_scales, float* sums) {
  if constexpr (M > 1)
    if (count < M) return group_rows<V, M - 1>(count, left, width, scale, offset, groups, weight, weight_scales, sums);
  group<M, V>(left, width, scale, offset, groups, weight, weight_scales, sums);
}

#ifdef SELFSPEC_TILES

constexpr int LEAST = 4;  // rows from which on tiles are faster

// Sums in tiles 0 to 2, weights in 3 to 5, inputs of up to 16 rows in 6.
struct alignas(64) Int8Config {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, GROUP};
  uint8_t rows[16] = {16, 16, 16, GROUP / 4, GROUP / 4, GROUP / 4, 16};
};

void begin_int8_tiles(int64_t count) {
  Int8Config config;
  for (int tile : {0, 1, 2, 6}) config.rows[tile] = count < TILE ? count : TILE;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// As `group` of up to 16 rows, with the same bits: the sums of a group are whole numbers.
template <int V>
inline void group_by_tiles(int64_t count, const int8_t* left, int64_t width, const float* scale, const int32_t* offset,
                           int64_t groups, const uint8_t* weight, const Bits* weight_scales, float* sums) {
  alignas(64) int32_t whole[V * TILE * LANES];
  asm volatile("" ::: "memory");  // the intrinsics do not say what they read
  _tile_loadd(6, left, width);
  _tile_zero(0);
  _tile_loadd(3, weight, 64);
  _tile_dpbsud(0, 6, 3);
  if constexpr (V > 1) {
    _tile_zero(1);
    _tile_loadd(4, weight + width * LANES, 64);
    _tile_dpbsud(1, 6, 4);
  }
  if constexpr (V > 2) {
    _tile_zero(2);
    _tile_loadd(5, weight + 2 * width * LANES, 64);
    _tile_dpbsud(2, 6, 5);
  }
  _tile_stored(0, whole, 64);
  if constexpr (V > 1) _tile_stored(1, whole + TILE * LANES, 64);
  if constexpr (V > 2) _tile_stored(2, whole + 2 * TILE * LANES, 64);
  asm volatile("" ::: "memory");
  __m512 scales[V];
#pragma GCC unroll 3
  for (int v = 0; v < V; v++) scales[v] = float_of(weight_scales + v * groups * LANES);
  for (int64_t m = 0; m < count; m++) {
    const __m512 by = _mm512_set1_ps(scale[m * groups]);
    const __m512i more = _mm512_set1_epi32(offset[m * groups]);
#pragma GCC unroll 3
    for (int v = 0; v < V; v++) {
      float* to = sums + (m * V + v) * LANES;
      const __m512i sum = _mm512_add_epi32(_mm512_load_si512(whole + (v * TILE + m) * LANES), more);
      const __m512 factor = _mm512_mul_ps(scales[v], by);
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, _mm512_load_ps(to)));
    }
  }
}

#endif

template <int V>
void panels(int64_t count, const int8_t* left, int64_t width, const float* scale, const int32_t* offset,
            const uint8_t* weight, const Bits* weight_scales, const Bits* bias, Bits* out, int64_t stride) {
  alignas(64) float sums[BAND * V * LANES];
  const int64_t groups = width / GROUP;
  for (int64_t start = 0; start < count; start += BAND) {
    const int64_t rows = count - start < BAND ? count - start : BAND;
    std::memset(sums, 0, rows * V * LANES * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t* from = weight + g * GROUP * LANES;
      for (int v = 0; v < V; v++)
        for (int line = 0; line < GROUP * LANES; line += 64) {
          const char* at = reinterpret_cast<const char*>(from + v * width * LANES + line);
          if (start == 0) _mm_prefetch(at + V * width * LANES, _MM_HINT_T1);  // the panels that come next
          _mm_prefetch(at + NEAR, _MM_HINT_T0);
        }
      for (int64_t m = 0; m < rows; m += ROWS) {
        const int64_t row = start + m, place = row * groups + g;
        const int8_t* of = left + row * width + g * GROUP;
        float* to = sums + m * V * LANES;
#ifdef SELFSPEC_TILES
        if (rows >= LEAST) {
          const int64_t each = rows - m < TILE ? rows - m : TILE;
          group_by_tiles<V>(each, of, width, scale + place, offset + place, groups, from, weight_scales + g * LANES, to);
          m += TILE - ROWS;
          continue;
        }
#endif
        group_rows<V>(rows - m, of, width, scale + place, offset + place, groups, from, weight_scales + g * LANES, to);
      }
    }
    for (int64_t m = 0; m < rows; m++)
      for (int v = 0; v < V; v++) {
        Floats whole = load(sums + (m * V + v) * LANES);
        if (bias) whole = add(whole, float_of(bias + v * LANES));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (start + m) * stride + v * LANES), rounded(whole));
      }
  }
}

}  // namespace

// left [count, width]; first, second, third: up to three weights [outputs / 16, width / 4, 16, 4], each plus 128, whose
// results stand side by side, with their scales [outputs / 16, width / 32, 16]; bias [a] where biased, with one weight;
// out [count, a + b + c].
extern "C" void kernel(const Bits* left, const uint8_t* first, const uint8_t* second, const uint8_t* third,
                       const Bits* first_scales, const Bits* second_scales, const Bits* third_scales, const Bits* bias, Bits* out,
                       int64_t count, int64_t width, int64_t a, int64_t b, int64_t c, int64_t biased) {
  static thread_local Scratch bytes, row_scales, offsets;
  const int64_t groups = width / GROUP, outputs = a + b + c;
  int8_t* quantized = reinterpret_cast<int8_t*>(bytes.of((count + TILE) * width / 4));  // tiles read whole ones
  float* scale = row_scales.of(count * groups);
  int32_t* offset = reinterpret_cast<int32_t*>(offsets.of(count * groups));
  const uint8_t* weights[] = {first, second, third};
  const Bits* scales[] = {first_scales, second_scales, third_scales};
  const int64_t sizes[] = {a, b, c};
  const auto blocks = [](int64_t size) { return (size / LANES + VECTORS - 1) / VECTORS; };
  const int64_t all = blocks(a) + blocks(b) + blocks(c);
#pragma omp parallel if (count * outputs * width > SMALL)
  {
#pragma omp for schedule(static)
  for (int64_t m = 0; m < count; m++)
    quantize(left + m * width, width, quantized + m * width, scale + m * groups, offset + m * groups);
#ifdef SELFSPEC_TILES
  begin_int8_tiles(count);
#endif
#pragma omp for schedule(static)
  for (int64_t i = 0; i < all; i++) {
    int64_t which = 0, block = i, before = 0;
    while (block >= blocks(sizes[which])) {
      block -= blocks(sizes[which]);
      before += sizes[which++];
    }
    const int64_t n = block * VECTORS * LANES, panels_left = (sizes[which] - n) / LANES;
    const uint8_t* weight = weights[which] + n * width;
    const Bits *weight_scales = scales[which] + n * groups, *added = biased ? bias + n : nullptr;
    Bits* to = out + before + n;
    if (panels_left >= VECTORS)
      panels<VECTORS>(count, quantized, width, scale, offset, weight, weight_scales, added, to, outputs);
    else if constexpr (VECTORS > 1)
      panels_left > 1 ? panels<2>(count, quantized, width, scale, offset, weight, weight_scales, added, to, outputs)
                      : panels<1>(count, quantized, width, scale, offset, weight, weight_scales, added, to, outputs);
  }
#ifdef SELFSPEC_TILES
  end_tiles();
#endif
  }
}
