// The common start of every kernel file: type names, conversions between stored numbers and f32, 16-byte accesses,
// and sums in a fixed order. This text is prepended to each `.cu` file, and no header is included, so that kernels
// compile on any machine with NVRTC. `act` is the element type of activations: f32, bf16 or f16 with -DACT_F32,
// -DACT_BF16 or -DACT_F16; arithmetic is always f32.
// The unit of fast access is eight elements: 16 bytes of bf16 and f16, 32 bytes of f32.
// Left out: matrix instructions and asynchronous copies (`matrix_unit.cuh`).

// The compute capability whose instructions are used, times ten. It may be set below that of the target, to run the
// code of an older GPU.
#if !defined(CAPABILITY)
#define CAPABILITY (__CUDA_ARCH__ / 10)
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;
typedef long long i64;

// Structs, so that no implicit conversion treats the bits as an integer.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

#if defined(ACT_BF16) && CAPABILITY < 80
#error "bf16 activations need compute capability 8.0"
#endif

#if defined(ACT_F32)
typedef float act;
#elif defined(ACT_BF16)
typedef bf16 act;
#elif defined(ACT_F16)
typedef f16 act;
#else
#error "one of ACT_F32, ACT_BF16 and ACT_F16 must be defined"
#endif

#define WARP 32
#define EVERY_LANE 0xffffffffu

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <typename T> __device__ __forceinline__ T ceil_div(T a, T b) { return (a + b - 1) / b; }

// ── kernels that start early ─────────────────────────────────────────────────────────────────────
// A kernel listed in `early.rs` may start while the previous kernel of the stream still runs. Until `await_previous`
// returns, it may read only memory that no kernel writes; afterwards all earlier kernels have ended. `start_next`
// allows the next kernel to start as soon as every block of this kernel has called it. In normal launches and on older
// GPUs, both do nothing.

__device__ __forceinline__ void await_previous() {
#if CAPABILITY >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_next() {
#if CAPABILITY >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ── one element ──────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest even. Numbers too large for f16 become infinite.
template <typename T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
#if CAPABILITY >= 80
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // The same bits as the instruction, which turns every NaN into 0x7fff.
    const u32 bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = is_nan ? (u16)0x7fff : (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
    return y;
}

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

__device__ __forceinline__ act to_act(float x) { return from_float<act>(x); }

// ── two and eight elements ───────────────────────────────────────────────────────────────────────

// Packs two 16-bit floats into a register, `low` at the lower address.
template <typename T> __device__ __forceinline__ u32 pack_two(float low, float high);

template <> __device__ __forceinline__ u32 pack_two<bf16>(float low, float high) {
#if CAPABILITY >= 80
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return (u32)from_float<bf16>(low).bits | (u32)from_float<bf16>(high).bits << 16;
#endif
}

template <> __device__ __forceinline__ u32 pack_two<f16>(float low, float high) {
#if CAPABILITY >= 80
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return (u32)from_float<f16>(low).bits | (u32)from_float<f16>(high).bits << 16;
#endif
}

template <typename T> __device__ __forceinline__ void unpack_two(u32 x, float &low, float &high);

template <> __device__ __forceinline__ void unpack_two<bf16>(u32 x, float &low, float &high) {
    low = __uint_as_float(x << 16);
    high = __uint_as_float(x & 0xffff0000u);
}

template <> __device__ __forceinline__ void unpack_two<f16>(u32 x, float &low, float &high) {
    low = to_float(f16{(u16)x});
    high = to_float(f16{(u16)(x >> 16)});
}

// Eight elements in their memory format, to hold while other loads are pending.
template <typename T> struct Eight {
    uint4 words;
};
template <> struct Eight<float> {
    uint4 words, more;
};

// `from` and `to` are aligned to 16 bytes. Ordinary loads, safe for buffers that are also written.
template <typename T> __device__ __forceinline__ Eight<T> read_eight(const T *from) {
    return Eight<T>{*(const uint4 *)from};
}

template <> __device__ __forceinline__ Eight<float> read_eight<float>(const float *from) {
    return Eight<float>{((const uint4 *)from)[0], ((const uint4 *)from)[1]};
}

template <typename T> __device__ __forceinline__ void write_eight(T *to, Eight<T> x) {
    *(uint4 *)to = x.words;
}

template <> __device__ __forceinline__ void write_eight<float>(float *to, Eight<float> x) {
    ((uint4 *)to)[0] = x.words;
    ((uint4 *)to)[1] = x.more;
}

template <typename T> __device__ __forceinline__ void unpack(Eight<T> x, float (&y)[8]) {
    unpack_two<T>(x.words.x, y[0], y[1]);
    unpack_two<T>(x.words.y, y[2], y[3]);
    unpack_two<T>(x.words.z, y[4], y[5]);
    unpack_two<T>(x.words.w, y[6], y[7]);
}

template <> __device__ __forceinline__ void unpack<float>(Eight<float> x, float (&y)[8]) {
    y[0] = __uint_as_float(x.words.x), y[1] = __uint_as_float(x.words.y);
    y[2] = __uint_as_float(x.words.z), y[3] = __uint_as_float(x.words.w);
    y[4] = __uint_as_float(x.more.x), y[5] = __uint_as_float(x.more.y);
    y[6] = __uint_as_float(x.more.z), y[7] = __uint_as_float(x.more.w);
}

template <typename T> __device__ __forceinline__ Eight<T> pack(const float (&x)[8]) {
    return Eight<T>{make_uint4(pack_two<T>(x[0], x[1]), pack_two<T>(x[2], x[3]), pack_two<T>(x[4], x[5]),
                               pack_two<T>(x[6], x[7]))};
}

template <> __device__ __forceinline__ Eight<float> pack<float>(const float (&x)[8]) {
    return Eight<float>{make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                   __float_as_uint(x[3])),
                        make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]),
                                   __float_as_uint(x[7]))};
}

template <typename T> __device__ __forceinline__ void load_eight(const T *from, float (&y)[8]) {
    unpack<T>(read_eight<T>(from), y);
}

template <typename T> __device__ __forceinline__ void store_eight(T *to, const float (&x)[8]) {
    write_eight<T>(to, pack<T>(x));
}

// N = 8 elements aligned to 16 bytes, or N = 1 anywhere, so that one kernel template serves both.
template <int N, typename T> __device__ __forceinline__ void load_span(const T *from, float (&y)[N]) {
    static_assert(N == 8 || N == 1, "a span is eight elements or one");
    if constexpr (N == 8)
        load_eight<T>(from, y);
    else
        y[0] = to_float(from[0]);
}

template <int N, typename T> __device__ __forceinline__ void store_span(T *to, const float (&x)[N]) {
    static_assert(N == 8 || N == 1, "a span is eight elements or one");
    if constexpr (N == 8)
        store_eight<T>(to, x);
    else
        to[0] = from_float<T>(x[0]);
}

// The position of span `index` of a matrix. Spans are counted along the rows.
template <int N> struct SpanPlace {
    i64 row;
    int column;
    __device__ __forceinline__ SpanPlace(u32 index, u32 spans_of_row) {
        u32 whole = index / spans_of_row;
        row = (i64)whole;
        column = N * (int)(index - whole * spans_of_row);
    }
    __device__ __forceinline__ i64 at(i64 stride) const { return row * stride + column; }
};

// ── weights in their stored type ─────────────────────────────────────────────────────────────────

#define STORED_F32 0
#define STORED_BF16 1
#define STORED_F16 2

__device__ __forceinline__ float stored_float(const void *stored, int dtype, i64 index) {
    if (dtype == STORED_F32)
        return ((const float *)stored)[index];
    if (dtype == STORED_BF16)
        return to_float(((const bf16 *)stored)[index]);
    return to_float(((const f16 *)stored)[index]);
}

// Elements `index` to `index + 7`, aligned to 16 bytes.
__device__ __forceinline__ void stored_eight(const void *stored, int dtype, i64 index, float (&y)[8]) {
    if (dtype == STORED_F32)
        load_eight<float>((const float *)stored + index, y);
    else if (dtype == STORED_BF16)
        load_eight<bf16>((const bf16 *)stored + index, y);
    else
        load_eight<f16>((const f16 *)stored + index, y);
}

// ── sums and maxima in a fixed order ─────────────────────────────────────────────────────────────
// Every thread gets the same bits. All threads of the warp, or of the block, must call.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, distance);
    return x;
}

// Sums over each group of `lanes` neighbouring lanes; `lanes` is a power of two and the same in the whole warp.
__device__ __forceinline__ float lanes_sum(float x, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, distance);
    return x;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, distance);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, distance));
    return x;
}

// For a block of whole warps along x. May be called repeatedly: the first barrier protects the previous use.
template <typename T> __device__ __forceinline__ T block_sum(T x) {
    __shared__ T parts[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = parts[0];
    for (int warp = 1; warp < (int)blockDim.x / WARP; ++warp)
        sum += parts[warp];
    return sum;
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = x;
    __syncthreads();
    float largest = parts[0];
    for (int warp = 1; warp < (int)blockDim.x / WARP; ++warp)
        largest = fmaxf(largest, parts[warp]);
    return largest;
}
