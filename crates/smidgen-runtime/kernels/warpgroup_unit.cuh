// Matrix instructions of a whole warpgroup on Hopper (sm_90a), barriers that count arrivals, and what orders ordinary
// stores before them: each as one line of PTX.
//
// A warpgroup is 4 warps. `multiply_add` of 64 rows: warp w has rows 16 w.. of the result and of a left side in
// registers, and each of these is as in `matrix_unit.cuh`. Operands in shared memory are named by descriptors of tiles
// whose rows are 128 bytes, the chunks of 16 bytes exchanged by the row's place among 8 (an address' bits 4 to 6 are
// xored with its bits 7 to 9), so that a tile begins at a multiple of 1024.
// The instructions only begin the product: registers of the result and of a left side are not to be touched between
// `wgmma_fence` and the wait that says they are done, and `settle` keeps the compiler from it.
// Left out: the copy engine: tiles come by `copy_async_16`.

// ── barriers that count arrivals ─────────────────────────────────────────────────────────────────
// A barrier of 8 bytes passes when `count` arrivals came; waits name the parity of the pass they wait for, and a new
// barrier counts as passed with parity 1.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Lingers for a while before it says no.
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

// The same, but it never lingers.
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

// With SPIN_LIMIT a wait ends at some time, and then results are wrong.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if defined(SPIN_LIMIT)
    for (int spins = SPIN_LIMIT; spins > 0 && !barrier_has_passed(barrier, parity); --spins)
        ;
#else
    while (!barrier_passed(barrier, parity))
        ;
#endif
}

// Barrier `id` (1 to 15) without waiting: the others wait by `barrier_of`.
__device__ __forceinline__ void barrier_pass_on(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Ordinary stores and copies of this thread before, reads by matrix instructions after a barrier.
__device__ __forceinline__ void order_stores_before_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Registers of each thread of this warpgroup from here on.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many of the newest groups are under way.
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

// The lower half of a descriptor; the upper half of all of them says that 8 rows are 1024 bytes and that chunks are
// exchanged. What lies some bytes further on has a descriptor greater by a 16th of them.

// The dimension that is summed lies along the rows of 128 bytes. 16 elements further on are 32 bytes.
__device__ __forceinline__ u32 rows_descriptor(u32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }

// The dimension that is summed is the row: 64 columns are 128 bytes, the next 64 begin `panel_bytes` further on.
// 16 rows further on are 2048 bytes.
__device__ __forceinline__ u32 columns_descriptor(u32 address, u32 panel_bytes) {
    return (address >> 4 & 0x3fff) | panel_bytes >> 4 << 16;
}

__device__ __forceinline__ u32 further(u32 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// The same in every lane, and known to be so by the compiler: what follows from it needs no register of its own.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(EVERY_LANE, x, 0); }

// c = left·rightᵀ, or c + left·rightᵀ: 64 rows, 128 columns, 16 summed; both sides lie in shared memory by `rows_descriptor`.
__device__ __forceinline__ void multiply_rows(float (&c)[64], u32 left, u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 left, right;\nsetp.ne.b32 adds, %66, 0;\n"
        "mov.b64 left, {%64, 0x40000040};\nmov.b64 right, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "left, right, adds, 1, 1, 0, 0;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(left), "r"(right), "r"((u32)add));
}

// The same with the left side in registers.
__device__ __forceinline__ void multiply_rows(float (&c)[64], const u32 (&left)[4], u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, %69, 0;\nmov.b64 right, {%68, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, right, adds, 1, 1, 0;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"((u32)add));
}

// c += left·right: 64 rows, 128 columns, 16 summed; the right side lies in shared memory by `columns_descriptor`.
__device__ __forceinline__ void multiply_columns(float (&c)[64], const u32 (&left)[4], u32 right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, 1, 0;\nmov.b64 right, {%68, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, right, adds, 1, 1, 1;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
          "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right));
}

// c = left·rightᵀ, or c + left·rightᵀ: 64 rows, 64 columns, 16 summed; both sides lie in shared memory by `rows_descriptor`.
__device__ __forceinline__ void multiply_rows(float (&c)[32], u32 left, u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 left, right;\nsetp.ne.b32 adds, %34, 0;\n"
        "mov.b64 left, {%32, 0x40000040};\nmov.b64 right, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "left, right, adds, 1, 1, 0, 0;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(left), "r"(right), "r"((u32)add));
}

// The same with the left side in registers.
__device__ __forceinline__ void multiply_rows(float (&c)[32], const u32 (&left)[4], u32 right, bool add) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, %37, 0;\nmov.b64 right, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, right, adds, 1, 1, 0;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"((u32)add));
}

// c += left·right: 64 rows, 64 columns, 16 summed; the right side lies in shared memory by `columns_descriptor`.
__device__ __forceinline__ void multiply_columns(float (&c)[32], const u32 (&left)[4], u32 right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, 1, 0;\nmov.b64 right, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPE "." MMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, right, adds, 1, 1, 1;\n}"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right));
}
