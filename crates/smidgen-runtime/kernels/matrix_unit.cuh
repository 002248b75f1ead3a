// The matrix instruction of Ampere and newer (m16n8k16 of bf16 or f16 with f32 sums), its loads from shared
// memory, asynchronous copies from global to shared memory, and barriers, each as one line of PTX.
// Turing has an instruction of half the depth, for f16 only, and no asynchronous copies: there a copy is done when the
// call returns. Volta has neither this instruction nor these loads: its lanes exchange their elements and multiply in
// f32.
//
// A fragment is a small matrix distributed over the 32 lanes of a warp. With g = lane / 4 and t = lane % 4:
//   A (16, 16): a0 = (g, 2t..), a1 = (g + 8, 2t..), a2 = (g, 2t + 8..), a3 = (g + 8, 2t + 8..), two elements each
//   B (16, 8):  b0 = (2t.., g), b1 = (2t + 8.., g)
//   C (16, 8):  c0, c1 = (g, 2t..), c2, c3 = (g + 8, 2t..)
// Two neighbouring C of 8 columns, rounded, are therefore one A: the result of one matmul can be the left operand of
// the next. Shared addresses are 32-bit offsets.
// Left out: the layout of tiles in shared memory (`attention_tiles.cuh`).

#if defined(ACT_F16)
#define MMA_TYPE "f16"
#else
#define MMA_TYPE "bf16"
#endif

__device__ __forceinline__ u32 shared_base() {
    extern __shared__ __align__(1024) uint4 shared_arena[];
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(shared_arena));
    return (u32)address;
}

#if CAPABILITY < 75
// Row g of A is in the four lanes with this g. Columns 2t and 2t + 1 of B are in the lanes whose g is 2t and 2t + 1.
// Not inlined, because kernels unroll hundreds of these calls.
__device__ __noinline__ float4 multiply_add_in_f32(float4 c, uint4 a, uint2 b) {
    const int lane = threadIdx.x % WARP, row = lane / 4 * 4, column = lane % 4 * 8;
    float left[4][2], right[2][2];
    unpack_two<f16>(a.x, left[0][0], left[0][1]);
    unpack_two<f16>(a.y, left[1][0], left[1][1]);
    unpack_two<f16>(a.z, left[2][0], left[2][1]);
    unpack_two<f16>(a.w, left[3][0], left[3][1]);
    unpack_two<f16>(b.x, right[0][0], right[0][1]);
    unpack_two<f16>(b.y, right[1][0], right[1][1]);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const int half = k / 8, from = k % 8 / 2, odd = k % 2;
        const float upper = __shfl_sync(EVERY_LANE, left[2 * half][odd], row + from);
        const float lower = __shfl_sync(EVERY_LANE, left[2 * half + 1][odd], row + from);
        const float first = __shfl_sync(EVERY_LANE, right[half][odd], column + from);
        const float second = __shfl_sync(EVERY_LANE, right[half][odd], column + 4 + from);
        c.x = fmaf(upper, first, c.x);
        c.y = fmaf(upper, second, c.y);
        c.z = fmaf(lower, first, c.z);
        c.w = fmaf(lower, second, c.w);
    }
    return c;
}
#endif

// c += a·b
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if CAPABILITY >= 80
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif CAPABILITY >= 75
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half ? b1 : b0));
#else
    const float4 sum = multiply_add_in_f32(make_float4(c[0], c[1], c[2], c[3]), make_uint4(a[0], a[1], a[2], a[3]),
                                           make_uint2(b0, b1));
    c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;
#endif
}

__device__ __forceinline__ u16 shared_load_2(u32 from) {
    u16 x;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ u32 shared_load_4(u32 from) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// Loads four (8, 8) matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8, and gets the
// elements (g, 2t..) of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
#if CAPABILITY >= 75
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
#else
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        m[i] = shared_load_4(__shfl_sync(EVERY_LANE, address, i * 8 + lane / 4) + lane % 4 * 4);
#endif
}

// The same, but a lane gets the elements (2t.., g).
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
#if CAPABILITY >= 75
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
#else
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 row = __shfl_sync(EVERY_LANE, address, i * 8 + lane % 4 * 2);
        const u32 next = __shfl_sync(EVERY_LANE, address, i * 8 + lane % 4 * 2 + 1);
        m[i] = (u32)shared_load_2(row + lane / 4 * 2) | (u32)shared_load_2(next + lane / 4 * 2) << 16;
    }
#endif
}

__device__ __forceinline__ void shared_store_2(u32 to, u16 x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

__device__ __forceinline__ void shared_store_4(u32 to, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void shared_store_16(u32 to, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

#if CAPABILITY >= 80
// Copies 16 bytes if `exists`, else writes zeros.
__device__ __forceinline__ void copy_async_16(u32 to, const void *from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(u32 to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the newest groups of this thread are pending.
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
// Loads that a thread has pending while it copies.
#define COPIES_AT_ONCE 8

// COUNT copies of 16 bytes by one thread. `place_of(i, to, from)` sets the destination and the source of copy i, and
// returns whether there is such a copy. If it leaves `from` null, zeros are written.
template <int COUNT, typename PlaceOf> __device__ __forceinline__ void copy_all_16(PlaceOf place_of) {
#pragma unroll
    for (int first = 0; first < COUNT; first += COPIES_AT_ONCE) {
        uint4 held[COPIES_AT_ONCE];
        u32 places[COPIES_AT_ONCE];
        bool exists[COPIES_AT_ONCE];
#pragma unroll
        for (int i = 0; i < COPIES_AT_ONCE; ++i) {
            const uint4 *from = nullptr;
            exists[i] = first + i < COUNT && place_of(first + i, places[i], from);
            held[i] = exists[i] && from != nullptr ? *from : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < COPIES_AT_ONCE; ++i)
            if (exists[i]) {
                const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
                shared_store_16(places[i], words);
            }
    }
}

__device__ __forceinline__ void copy_async_4(u32 to, const void *from, bool exists) {
    shared_store_4(to, exists ? *(const u32 *)from : 0);
}

__device__ __forceinline__ void copy_async_commit() {}

template <int PENDING> __device__ __forceinline__ void copy_async_wait() {}
#endif

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void barrier_of(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void shared_load_16(u32 (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ float2 shared_load_floats(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

// 2^x, and 0 at -infinity. The error is at most two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh(x) from 2^(x · 2 log2(e)): absolute error 2e-7, exact at both infinities.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(power_of_two(x * 2.885390082f) + 1.0f));
    return 1.0f - 2.0f * y;
}
