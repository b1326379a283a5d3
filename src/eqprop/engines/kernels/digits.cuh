// Numbers as three signed bytes, hi * 65536 + mid * 256 + lo, whose products tensor cores sum without rounding.

#define LARGEST 8355711                // 127 * (65536 + 256 + 1): the largest number of three such bytes

struct Planes { u32 hi, mid, lo; };    // the same four numbers' bytes, a word each

__device__ __forceinline__ u32 bytes(u32 a, u32 b, u32 which) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
  return d;
}

// The number in its lower three bytes: lo, mid, hi.
__device__ __forceinline__ u32 digits(float v) {
  const int whole = max(min(__float2int_rn(v), LARGEST), -LARGEST);
  return ((u32)whole + 0x808080u) ^ 0x808080u;
}

__device__ __forceinline__ Planes planes(u32 p, u32 q, u32 r, u32 s) {
  const u32 lower = bytes(p, q, 0x5140), upper = bytes(r, s, 0x5140);
  return {bytes(bytes(p, q, 0x0062), bytes(r, s, 0x0062), 0x5410), bytes(lower, upper, 0x7632), bytes(lower, upper, 0x5410)};
}

// A number from the sums of products of its digits: top of hi * hi, middle of the two of 256 times less, bottom of the three below. The
// smaller products are left out. Up to 256 products, middle * 256 + bottom fits an int.
__device__ __forceinline__ float joined(int top, int middle, int bottom) {
  return fmaf((float)top, 65536.0f, (float)(middle * 256 + bottom));
}
#define UNIT (65536.0f / LARGEST / LARGEST)  // what `joined` counts in, of two numbers up to 1 as LARGEST

// Where unit u of a tile of sixteen lies in it: as a thread has its neurons (spot.cuh), four to a word.
__device__ __forceinline__ int place_in_tile(int u) { return u % 8 / 2 * 4 + u % 2 + u / 8 * 2; }
