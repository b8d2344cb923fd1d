// Sixteen numbers of 4 bytes, one register with AVX-512 and two with AVX2, and what the kernels do with them.
#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Bits = uint16_t;  // of a bfloat16

#ifdef SELFSPEC_AVX512

using Floats = __m512;
using Ints = __m512i;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* at) { return _mm512_load_ps(at); }
inline void store(float* at, Floats x) { _mm512_store_ps(at, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }     // ab + c
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }   // c - ab
inline Floats float_of(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints pairs_at(const Bits* at) { return _mm512_loadu_si512(at); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Ints any_of(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline bool is_zero(Ints x) { return _mm512_test_epi32_mask(x, x) == 0; }
inline bool any_not_below(Floats x, float limit) { return _mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ); }

// The lower half of each 32 bits is one number, the upper half the next one.
inline Floats lower(Ints pairs) { return as_floats(_mm512_slli_epi32(pairs, 16)); }
inline Floats upper(Ints pairs) { return as_floats(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))); }

// 16 numbers as float32, in their order.
inline Floats float_of(const Bits* from) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline __m256i rounded(Floats sum) {  // to the nearest, ties to even; NaN stays NaN
  const Ints bits = as_ints(sum);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Ints up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(_mm512_srli_epi32(up, 16), nan, 0x7fc0));
}

inline void store_pairs(Bits* to, Floats even, Floats odd) {  // rounded
  const Ints low = _mm512_cvtepu16_epi32(rounded(even)), high = _mm512_cvtepu16_epi32(rounded(odd));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// 2^n p for whole n, and 0 where x is below the limit.
inline Floats scaled(Floats p, Floats n, Floats x, float limit) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), p, n);
}
inline Floats whole(Floats x) { return _mm512_roundscale_ps(x, 8); }  // to the nearest

// 16 rows of 16 numbers of 4 bytes; number i of row j becomes number j of row i.
inline void transpose(Ints (&v)[16]) {
  Ints w[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    w[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    w[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    w[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    w[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0xdd);
  }
}

// What the left side of a product is held as: where an instruction adds two bfloat16 products, as it is.
#ifdef SELFSPEC_PAIRS
using Left = Bits;
inline Ints all(const Bits* at) {  // both numbers, 16 times
  int32_t both;
  std::memcpy(&both, at, sizeof(both));
  return _mm512_set1_epi32(both);
}
inline Floats fmadd(Ints a, Ints b, Floats c) {  // both products of each pair are added
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#else
using Left = float;
#endif

#else

using Left = float;
struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* at) { return {_mm256_load_ps(at), _mm256_load_ps(at + 8)}; }
inline void store(float* at, Floats x) {
  _mm256_store_ps(at, x.a);
  _mm256_store_ps(at + 8, x.b);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats subtract(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats multiply(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats divide(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats fmadd(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats fnmadd(Floats x, Floats y, Floats z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline Floats float_of(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m256i half_at(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline Ints pairs_at(const Bits* at) { return {half_at(at), half_at(at + 16)}; }
inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Ints as_ints(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline Ints any_of(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline bool is_zero(Ints x) {
  const __m256i any = _mm256_or_si256(x.a, x.b);
  return _mm256_testz_si256(any, any);
}
inline bool any_not_below(Floats x, float limit) {
  const __m256 least = _mm256_set1_ps(limit);
  return _mm256_movemask_ps(
      _mm256_or_ps(_mm256_cmp_ps(x.a, least, _CMP_NLT_UQ), _mm256_cmp_ps(x.b, least, _CMP_NLT_UQ)));
}

inline __m256 lower(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 upper(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}
inline Floats lower(Ints pairs) { return {lower(pairs.a), lower(pairs.b)}; }
inline Floats upper(Ints pairs) { return {upper(pairs.a), upper(pairs.b)}; }

inline Floats float_of(const Bits* from) {
  const auto half = [](const Bits* at) {
    return lower(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  };
  return {half(from), half(from + 8)};
}

inline __m256i nearest(__m256 sum) {  // in the lower half of each 32 bits
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline __m256i rounded(Floats sum) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(nearest(sum.a), nearest(sum.b)), 0xd8);
}

inline void store_pairs(Bits* to, Floats even, Floats odd) {
  const auto half = [](Bits* at, __m256 low, __m256 high) {
    const __m256i both = _mm256_or_si256(nearest(low), _mm256_slli_epi32(nearest(high), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), both);
  };
  half(to, even.a, odd.a);
  half(to + 16, even.b, odd.b);
}

inline Floats scaled(Floats p, Floats n, Floats x, float limit) {
  const auto half = [limit](__m256 p, __m256 n, __m256 x) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ));
  };
  return {half(p.a, n.a, x.a), half(p.b, n.b, x.b)};
}
inline Floats whole(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }

inline void transpose(Ints (&v)[16]) {
  alignas(32) int32_t from[16][16], to[16][16];
  std::memcpy(from, v, sizeof(from));
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[i][j] = from[j][i];
  std::memcpy(v, to, sizeof(to));
}

#endif

// Numbers to write to, at the start of a cache line.
struct Scratch {
  std::vector<float> held;
  float* of(size_t count) {
    if (held.size() < count + 16) held.resize(count + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(held.data()) + 63) / 64 * 64);
  }
};

}  // namespace
