// Numbers as three signed bytes, hi * 65536 + mid * 256 + lo, whose products tensor cores sum without rounding.

#define LARGEST 8355711                // 127 * (65536 + 256 + 1): the largest number of three such bytes

struct Planes { u32 hi, mid, lo; };    // the bytes of the same four numbers, one word per plane

__device__ __forceinline__ u32 bytes(u32 a, u32 b, u32 which) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
  return d;
}

// A number in the lower three bytes: lo, mid, hi.
__device__ __forceinline__ u32 digits(float v) {
  const int whole = max(min(__float2int_rn(v), LARGEST), -LARGEST);
  return ((u32)whole + 0x808080u) ^ 0x808080u;
}

// The same for a number from 0 to 1 times LARGEST; the fourth byte is arbitrary. Adding 2^23 leaves the integer in the low
// bits; a NaN becomes arbitrary digits, and is detected where it arose.
__device__ __forceinline__ u32 digits_of_unit(float v) { return (__float_as_uint(fmaf(v, (float)LARGEST, 8388608.0f)) + 0x808080u) ^ 0x808080u; }

__device__ __forceinline__ Planes planes(u32 p, u32 q, u32 r, u32 s) {
  const u32 lower = bytes(p, q, 0x5140), upper = bytes(r, s, 0x5140);
  return {bytes(bytes(p, q, 0x0062), bytes(r, s, 0x0062), 0x5410), bytes(lower, upper, 0x7632), bytes(lower, upper, 0x5410)};
}

// Sixteen rows of weights by eight columns of states: sums of products of their digits. Top holds hi * hi, middle the two products
// 256 times smaller, bottom the next three; the smaller ones are dropped.
struct Sums {
  int top[4] = {}, middle[4] = {}, bottom[4] = {};

  // Two tiles of states, or one.
  __device__ __forceinline__ void add(const u32 (&hi)[4], const u32 (&mid)[4], uint4 lo, Planes x, Planes y) {
    mma(top, hi[0], hi[1], hi[2], hi[3], x.hi, y.hi);
    mma(middle, hi[0], hi[1], hi[2], hi[3], x.mid, y.mid);
    mma(bottom, hi[0], hi[1], hi[2], hi[3], x.lo, y.lo);
    mma(middle, mid[0], mid[1], mid[2], mid[3], x.hi, y.hi);
    mma(bottom, mid[0], mid[1], mid[2], mid[3], x.mid, y.mid);
    mma(bottom, lo.x, lo.y, lo.z, lo.w, x.hi, y.hi);
  }
  __device__ __forceinline__ void add(uint2 hi, uint2 mid, uint2 lo, Planes x) {
    mma(top, hi.x, hi.y, x.hi);
    mma(middle, hi.x, hi.y, x.mid);
    mma(bottom, hi.x, hi.y, x.lo);
    mma(middle, mid.x, mid.y, x.hi);
    mma(bottom, mid.x, mid.y, x.mid);
    mma(bottom, lo.x, lo.y, x.hi);
  }
  // In units. For up to 256 products, middle * 256 + bottom fits an int.
  __device__ __forceinline__ float operator[](int i) const { return fmaf((float)top[i], 65536.0f, (float)(middle[i] * 256 + bottom[i])); }
};
// Their value, for weights up to `most` and states up to 1. Rounded once: an error common to all rows would accumulate over steps.
__device__ __forceinline__ float worth(float most) { return (float)(most * (65536.0 / LARGEST / LARGEST)); }
