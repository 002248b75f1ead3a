// Warpgroup matrix instructions (wgmma) of Hopper (sm_90a), mbarriers, and fences, each as one line of PTX.
//
// A warpgroup is 4 warps. In a matmul of 64 rows, warp w has the 16 rows from 16 w on, of the result and of a left
// operand in registers, as fragments of `matrix_unit.cuh`. Operands in shared memory are passed as descriptors of tiles
// with rows of 128 bytes. The 16-byte chunks of a row are swizzled (address bits 4 to 6 are xored with bits 7 to 9), so
// a tile has to begin at a multiple of 1024.
// The instructions are asynchronous: the registers of the result and of a left operand must not be touched between
// `wgmma_fence` and the wait for their group, and `settle` keeps the compiler from doing so.
// Left out: the copy engine (TMA); tiles are copied with `copy_async_16`.

// ── mbarriers ────────────────────────────────────────────────────────────────────────────────────
// A barrier (8 bytes) completes a phase after `count` arrivals. A wait passes the parity of the phase that it waits
// for. For a new barrier, the phase with parity 1 counts as complete.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// May block for a while before it returns false.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile("{\n.reg .pred passed;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, passed;\n}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed;
}

// Like `barrier_passed`, but never blocks.
__device__ __forceinline__ bool barrier_has_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile("{\n.reg .pred passed;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, passed;\n}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed;
}

// With SPIN_LIMIT, for debugging only, a wait gives up after a while, and the results are then wrong.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if defined(SPIN_LIMIT)
    for (int spins = SPIN_LIMIT; spins > 0 && !barrier_has_passed(barrier, parity); --spins)
        ;
#else
    while (!barrier_passed(barrier, parity))
        ;
#endif
}

// Arrives at barrier `id` (1 to 15) without waiting; other threads wait with `barrier_of`.
__device__ __forceinline__ void barrier_arrive_named(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes the stores and copies of this thread visible to matrix instructions after a barrier.
__device__ __forceinline__ void fence_stores_before_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Sets the registers per thread of this warpgroup.
template <int COUNT> __device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ── matmuls ──────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the newest groups are pending.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N> __device__ __forceinline__ void settle(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+f"(c[i])::"memory");
}

template <int N> __device__ __forceinline__ void settle(u32 (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// The functions return the lower half of a descriptor; the upper half is constant: 8 rows are 1024 bytes, and chunks
// are swizzled. Adding n bytes to the address adds n / 16 to the descriptor.

// For a tile whose summed dimension runs along its rows of 128 bytes. The next 16 elements are 32 bytes further on.
__device__ __forceinline__ u32 rows_descriptor(u32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }

// For a tile whose summed dimension runs across its rows. A row has 64 columns in 128 bytes; the next 64 columns begin
// `panel_bytes` further on. The next 16 rows are 2048 bytes further on.
__device__ __forceinline__ u32 columns_descriptor(u32 address, u32 panel_bytes) {
    return (address >> 4 & 0x3fff) | panel_bytes >> 4 << 16;
}

__device__ __forceinline__ u32 further(u32 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Tells the compiler that a value is the same in every lane, so that it can use uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(EVERY_LANE, x, 0); }

// The registers of a result as text for an `asm` statement, and as its operands.
#define REGISTERS_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64                                                                                                   \
    REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OUTPUTS_8(c, i)                                                                                                \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]),        \
        "+f"(c[i + 7])
#define OUTPUTS_32(c) OUTPUTS_8(c, 0), OUTPUTS_8(c, 8), OUTPUTS_8(c, 16), OUTPUTS_8(c, 24)
#define OUTPUTS_64(c) OUTPUTS_32(c), OUTPUTS_8(c, 32), OUTPUTS_8(c, 40), OUTPUTS_8(c, 48), OUTPUTS_8(c, 56)

// c = left·rightᵀ, or c + left·rightᵀ: 64 rows, 128 columns, depth 16; both operands are `rows_descriptor`s.
__device__ __forceinline__ void multiply_rows(float (&c)[64], u32 left, u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 left, right;\nsetp.ne.b32 adds, %66, 0;\n"
        "mov.b64 left, {%64, 0x40000040};\nmov.b64 right, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_64 "}, "
        "left, right, adds, 1, 1, 0, 0;\n}"
        : OUTPUTS_64(c)
        : "r"(left), "r"(right), "r"((u32)add));
}

// The same with the left operand in registers.
__device__ __forceinline__ void multiply_rows(float (&c)[64], const u32 (&left)[4], u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, %69, 0;\nmov.b64 right, {%68, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_64 "}, "
        "{%64, %65, %66, %67}, right, adds, 1, 1, 0;\n}"
        : OUTPUTS_64(c)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"((u32)add));
}

// c += left·right: 64 rows, 128 columns, depth 16; the right operand is a `columns_descriptor`.
__device__ __forceinline__ void multiply_columns(float (&c)[64], const u32 (&left)[4], u32 right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, 1, 0;\nmov.b64 right, {%68, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_64 "}, "
        "{%64, %65, %66, %67}, right, adds, 1, 1, 1;\n}"
        : OUTPUTS_64(c)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right));
}

// c = left·rightᵀ, or c + left·rightᵀ: 64 rows, 64 columns, depth 16; both operands are `rows_descriptor`s.
__device__ __forceinline__ void multiply_rows(float (&c)[32], u32 left, u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 left, right;\nsetp.ne.b32 adds, %34, 0;\n"
        "mov.b64 left, {%32, 0x40000040};\nmov.b64 right, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_32 "}, "
        "left, right, adds, 1, 1, 0, 0;\n}"
        : OUTPUTS_32(c)
        : "r"(left), "r"(right), "r"((u32)add));
}

// The same with the left operand in registers.
__device__ __forceinline__ void multiply_rows(float (&c)[32], const u32 (&left)[4], u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, %37, 0;\nmov.b64 right, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_32 "}, "
        "{%32, %33, %34, %35}, right, adds, 1, 1, 0;\n}"
        : OUTPUTS_32(c)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"((u32)add));
}

// c += left·right: 64 rows, 64 columns, depth 16; the right operand is a `columns_descriptor`.
__device__ __forceinline__ void multiply_columns(float (&c)[32], const u32 (&left)[4], u32 right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, 1, 0;\nmov.b64 right, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{" REGISTERS_32 "}, "
        "{%32, %33, %34, %35}, right, adds, 1, 1, 1;\n}"
        : OUTPUTS_32(c)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right));
}
