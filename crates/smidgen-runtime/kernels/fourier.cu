// LS-LoRA's bounded nonlinearity after B, fused with the low-rank matmul.
// Forward:  z = scale h Bᵀ   s = |sigma| + 1e-6   u = tanh(z / s)   n = sin(pi u)   c = cos(pi u)
//           y = base + a0 + a1 u + a2 n + a3 c
// Backward, with dn/du = pi c, dc/du = -pi n and du/dz = (1 - u²) / s:
//           da0, da1, da2, da3 = the sums of dy, dy u, dy n, dy c
//           dz = dy (a1 + pi a2 c - pi a3 n) (1 - u²) / s
// u depends on s only through z / s, and d(z / s)/ds = -(z / s) / s, so ds = -sum of dz z / s. With ds/dsigma =
// sign(sigma):
//           dsigma = -sign(sigma) sum of dz z / s
// z is never stored: a warp computes 16 rows by 32 columns of z with matrix instructions (bf16, f16; plain arithmetic
// for f32) and uses them at once. So forward and backward read one element and write one for each of N T, like an
// addition. Columns are assigned so that each thread owns eight neighbours; with `ALIGNED`, they are read and written
// together.
// The five sums are f32 within a thread and f64 across threads. Each block writes its own sums, and a second kernel
// adds them in order. `matrix_unit.cuh` comes before this text.

#define FOURIER_THREADS 256
#define FOURIER_SLAB_ROWS 256
#define FOURIER_TILE_ROWS 16
#define FOURIER_TILE_COLUMNS 32
#define FOURIER_SUMS 5
// Resident blocks per multiprocessor, which limits a thread to 80 registers.
#define FOURIER_BLOCKS_AT_ONCE 3

// Warps along columns and along rows. The tile of B must fit in shared memory for a rank of 256.
#if defined(ACT_F32)
#define FOURIER_COLUMN_WARPS 2
#else
#define FOURIER_COLUMN_WARPS 4
#endif
#define FOURIER_ROW_WARPS (FOURIER_THREADS / WARP / FOURIER_COLUMN_WARPS)
#define FOURIER_TURN_ROWS (FOURIER_ROW_WARPS * FOURIER_TILE_ROWS)
#define FOURIER_BLOCK_COLUMNS (FOURIER_TILE_COLUMNS * FOURIER_COLUMN_WARPS)

// ── the low-rank matmul ───────────────────────────────────────────────────────────────────────────
// A thread's part of a tile of z: z[0] is in row `lane / 4`, z[1] is eight rows below, both in eight columns from
// 8 (lane % 4) on.

struct LowRank {
    const act *h; // (T, R)
    i64 h_stride;
    const act *b; // (N, R)
    i64 b_stride;
    i32 rank, rows, columns;
};

#if defined(ACT_F32)

// Copies the block's rows of B (columns of z) to shared memory as (R, FOURIER_BLOCK_COLUMNS).
__device__ __forceinline__ void load_b(const LowRank &low_rank, i32 first_column, float *tile) {
    for (i32 at = threadIdx.x; at < low_rank.rank * FOURIER_BLOCK_COLUMNS; at += FOURIER_THREADS) {
        const i32 column = first_column + at % FOURIER_BLOCK_COLUMNS, k = at / FOURIER_BLOCK_COLUMNS;
        tile[at] = column < low_rank.columns ? low_rank.b[(i64)column * low_rank.b_stride + k] : 0.0f;
    }
}

// In f32 nothing is read ahead: `multiply` reads the rows of h element by element.
template <bool ALIGNED> struct FirstOfH {
    __device__ __forceinline__ void read(const LowRank &, i32) {}
};

template <bool ALIGNED>
__device__ __forceinline__ void multiply(const LowRank &low_rank, const float *tile, i32 column_warp, i32 row,
                                         const FirstOfH<ALIGNED> &, float (&z)[2][8]) {
    const i32 lane = threadIdx.x % WARP;
    const i32 upper = row + lane / 4, lower = upper + 8;
    const float *upper_h = low_rank.h + (i64)min(upper, low_rank.rows - 1) * low_rank.h_stride;
    const float *lower_h = low_rank.h + (i64)min(lower, low_rank.rows - 1) * low_rank.h_stride;
    const float *b = tile + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int at = 0; at < 8; ++at)
        z[0][at] = z[1][at] = 0.0f;
#pragma unroll 4
    for (i32 k = 0; k < low_rank.rank; ++k, b += FOURIER_BLOCK_COLUMNS) {
        float b_here[8];
        load_eight<float>(b, b_here);
#pragma unroll
        for (int at = 0; at < 8; ++at) {
            z[0][at] = fmaf(upper_h[k], b_here[at], z[0][at]);
            z[1][at] = fmaf(lower_h[k], b_here[at], z[1][at]);
        }
    }
}

#else

__device__ __forceinline__ u32 pair_of_b(const LowRank &low_rank, i32 column, i32 k) {
    if (column >= low_rank.columns)
        return 0;
    const act *b = low_rank.b + (i64)column * low_rank.b_stride + k;
    return (k < low_rank.rank ? (u32)b[0].bits : 0) | (k + 1 < low_rank.rank ? (u32)b[1].bits << 16 : 0);
}

// Copies the block's rows of B (columns of z) to shared memory in the layout of the matrix instruction: for each 16 of
// R, for each warp and each of its four tiles of eight columns, every lane has one word for k and one for k + 8. Column
// 2q + e of tile j is column 8q + 2j + e of the warp's 32, so that lane q gets the results of eight neighbours.
__device__ __forceinline__ void load_b(const LowRank &low_rank, i32 first_column, float *tile) {
    uint2 *fragments = (uint2 *)tile;
    const i32 steps = (low_rank.rank + 15) / 16;
    for (i32 at = threadIdx.x; at < steps * FOURIER_COLUMN_WARPS * 4 * WARP; at += FOURIER_THREADS) {
        const i32 lane = at % WARP, j = at / WARP % 4, column_warp = at / (4 * WARP) % FOURIER_COLUMN_WARPS;
        const i32 k = at / (4 * WARP * FOURIER_COLUMN_WARPS) * 16 + lane % 4 * 2;
        const i32 in_warp = lane / 8 * 8 + 2 * j + lane / 4 % 2;
        const i32 column = first_column + column_warp * FOURIER_TILE_COLUMNS + in_warp;
        fragments[at] = make_uint2(pair_of_b(low_rank, column, k), pair_of_b(low_rank, column, k + 8));
    }
}

template <bool ALIGNED> __device__ __forceinline__ u32 pair_of_h(const LowRank &low_rank, i32 row, i32 k) {
    if (row >= low_rank.rows || k >= low_rank.rank)
        return 0;
    const act *h = low_rank.h + (i64)row * low_rank.h_stride + k;
    if constexpr (ALIGNED)
        return *(const u32 *)h;
    return (u32)h[0].bits | (k + 1 < low_rank.rank ? (u32)h[1].bits << 16 : 0);
}

// A lane's elements of h for one matrix instruction.
template <bool ALIGNED>
__device__ __forceinline__ void part_of_h(const LowRank &low_rank, i32 row, i32 k, u32 (&a)[4]) {
    const i32 upper = row + threadIdx.x % WARP / 4, lower = upper + 8;
    a[0] = pair_of_h<ALIGNED>(low_rank, upper, k), a[1] = pair_of_h<ALIGNED>(low_rank, lower, k);
    a[2] = pair_of_h<ALIGNED>(low_rank, upper, k + 8), a[3] = pair_of_h<ALIGNED>(low_rank, lower, k + 8);
}

// A lane's elements of h for the first 16 of R, which are read ahead. For usual ranks that is all or half of h.
template <bool ALIGNED> struct FirstOfH {
    u32 a[4];

    __device__ __forceinline__ void read(const LowRank &low_rank, i32 row) {
        part_of_h<ALIGNED>(low_rank, row, threadIdx.x % 4 * 2, a);
    }
};

template <bool ALIGNED>
__device__ __forceinline__ void multiply(const LowRank &low_rank, const float *tile, i32 column_warp, i32 row,
                                         const FirstOfH<ALIGNED> &first, float (&z)[2][8]) {
    const i32 lane = threadIdx.x % WARP;
    const uint2 *fragments = (const uint2 *)tile + column_warp * 4 * WARP + lane;
    float sums[4][4] = {};
    u32 a[4] = {first.a[0], first.a[1], first.a[2], first.a[3]};
#pragma unroll 1
    for (i32 k = 0; k < low_rank.rank; k += 16) {
        if (k > 0)
            part_of_h<ALIGNED>(low_rank, row, k + lane % 4 * 2, a);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2 b = fragments[j * WARP];
            multiply_add(sums[j], a, b.x, b.y);
        }
        fragments += FOURIER_COLUMN_WARPS * 4 * WARP;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        z[0][2 * j] = sums[j][0], z[0][2 * j + 1] = sums[j][1];
        z[1][2 * j] = sums[j][2], z[1][2 * j + 1] = sums[j][3];
    }
}

#endif

// ── the nonlinearity ──────────────────────────────────────────────────────────────────────────────

// With r = 1 / (e^2x + 1):  tanh x = 1 - 2 r, and its derivative 1 - tanh² x = 4 r (1 - r).

// The parameters of a module.
struct Module {
    float a[4];
    float gain;      // scale / s
    float inverse_s; // 1 / s
#if !defined(ACT_F32)
    // a0 + a3 c and a1 + a2 n / u as polynomials in u².
    float even[6], odd[6];
#endif
};

// u, n and c of one element.
struct Wave {
    float u, n, c;
    float rest; // (1 - u²) / 4
};

#if defined(ACT_F32)

__device__ __forceinline__ Wave wave_of(float x) {
    const float u = tanhf(x);
    return Wave{u, sinpif(u), cospif(u), 0.25f * (1.0f - u) * (1.0f + u)};
}

__device__ __forceinline__ void expand(Module &) {}

__device__ __forceinline__ float phi_of(const Module &module, float x) {
    const Wave wave = wave_of(x);
    return module.a[0] + module.a[1] * wave.u + module.a[2] * wave.n + module.a[3] * wave.c;
}

#else

// sin(pi u) / u and cos(pi u) as polynomials in u² (minimax; errors in f32 4e-7 and 1.5e-6, far below the rounding of
// 16-bit activations).
#define SINE {3.1415913f, -5.167675f, 2.549864f, -0.59823984f, 0.08043266f, -0.0059732916f}
#define COSINE {0.99999905f, -4.9347415f, 4.0580654f, -1.3325088f, 0.22985177f, -0.020667242f}

__device__ __forceinline__ float polynomial(const float (&k)[6], float w) {
    float y = k[5];
#pragma unroll
    for (int power = 4; power >= 0; --power)
        y = fmaf(y, w, k[power]);
    return y;
}

// 1 / (e^2x + 1).
__device__ __forceinline__ float sink(float x) {
    float power, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 2.88539008f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(power + 1.0f));
    return r;
}

__device__ __forceinline__ Wave wave_of(float x) {
    const float sine[6] = SINE, cosine[6] = COSINE;
    const float r = sink(x), u = fmaf(-2.0f, r, 1.0f), w = u * u;
    return Wave{u, u * polynomial(sine, w), polynomial(cosine, w), fmaf(-r, r, r)};
}

__device__ __forceinline__ void expand(Module &module) {
    const float sine[6] = SINE, cosine[6] = COSINE;
#pragma unroll
    for (int power = 0; power < 6; ++power) {
        module.even[power] = module.a[3] * cosine[power] + (power == 0 ? module.a[0] : 0.0f);
        module.odd[power] = module.a[2] * sine[power] + (power == 0 ? module.a[1] : 0.0f);
    }
}

__device__ __forceinline__ float phi_of(const Module &module, float x) {
    const float u = fmaf(-2.0f, sink(x), 1.0f), w = u * u;
    return fmaf(u, polynomial(module.odd, w), polynomial(module.even, w));
}

#endif

// Called by one thread. The divisions are in f64 and rounded once.
__device__ __forceinline__ void read_module(Module &module, const float *coefficients, const float *sigma, float scale) {
    const double s = (double)__fadd_rn(fabsf(*sigma), 1e-6f);
#pragma unroll
    for (int at = 0; at < 4; ++at)
        module.a[at] = coefficients[at];
    module.gain = (float)((double)scale / s);
    module.inverse_s = (float)(1.0 / s);
    expand(module);
}

// Reads up to eight elements and fills the rest with zeros. If `ALIGNED`, it reads eight elements or none.
template <bool ALIGNED> __device__ __forceinline__ Eight<act> read_some(const act *from, i32 count) {
    if constexpr (ALIGNED)
        return count > 0 ? read_eight<act>(from) : Eight<act>{};
    float x[8];
#pragma unroll
    for (int at = 0; at < 8; ++at)
        x[at] = at < count ? to_float(from[at]) : 0.0f;
    return pack<act>(x);
}

template <bool ALIGNED> __device__ __forceinline__ void write_some(act *to, i32 count, const float (&x)[8]) {
    if constexpr (ALIGNED) {
        if (count > 0)
            store_eight<act>(to, x);
        return;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at)
        if (at < count)
            to[at] = to_act(x[at]);
}

// The inputs of a thread for one tile. Those of the next tile are read before the current tile is computed.
template <bool ALIGNED> struct TileInputs {
    Eight<act> x[2];
    FirstOfH<ALIGNED> h;

    __device__ __forceinline__ void read(const LowRank &low_rank, const act *matrix, i64 stride, i32 first, i32 column) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + threadIdx.x % WARP / 4 + 8 * part;
            const i32 count = row < low_rank.rows ? low_rank.columns - column : 0;
            x[part] = read_some<ALIGNED>(matrix + (i64)row * stride + column, count);
        }
        h.read(low_rank, first);
    }
};

// ── forward ───────────────────────────────────────────────────────────────────────────────────────

// Forward: `from` is base and `to` is y. Backward: `from` is dy and `to` is dz.
struct Fourier {
    LowRank low_rank;
    const float *coefficients, *sigma;
    float scale;
    const act *from;
    i64 from_stride;
    act *to;
    i64 to_stride;
    double *partials; // backward only, (FOURIER_SUMS, blocks): sums of dy, dy u, dy n, dy c and dz z / s
};

// `y` may be `base`: a thread reads only the elements that it writes.
template <bool ALIGNED> __device__ __forceinline__ void fourier(const Fourier &all) {
    extern __shared__ float4 shared_tile[];
    __shared__ Module shared_module;
    float *tile = (float *)shared_tile;
    const LowRank low_rank = all.low_rank;
    const i32 rows = low_rank.rows, columns = low_rank.columns;
    load_b(low_rank, blockIdx.x * FOURIER_BLOCK_COLUMNS, tile);
    if (threadIdx.x == 0)
        read_module(shared_module, all.coefficients, all.sigma, all.scale);
    __syncthreads();
    const Module module = shared_module;
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 column_warp = warp % FOURIER_COLUMN_WARPS;
    const i32 column = blockIdx.x * FOURIER_BLOCK_COLUMNS + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
    const i32 count = columns - column, end = min(rows, (i32)(blockIdx.y + 1) * FOURIER_SLAB_ROWS);
    i32 first = blockIdx.y * FOURIER_SLAB_ROWS + warp / FOURIER_COLUMN_WARPS * FOURIER_TILE_ROWS;
    TileInputs<ALIGNED> next;
    next.read(low_rank, all.from, all.from_stride, first, column);
#pragma unroll 1
    for (; first < end; first += FOURIER_TURN_ROWS) {
        const TileInputs<ALIGNED> here = next;
        if (first + FOURIER_TURN_ROWS < end)
            next.read(low_rank, all.from, all.from_stride, first + FOURIER_TURN_ROWS, column);
        float z[2][8];
        multiply(low_rank, tile, column_warp, first, here.h, z);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
            float x[8];
            unpack<act>(here.x[part], x);
#pragma unroll
            for (int at = 0; at < 8; ++at)
                x[at] += phi_of(module, z[part][at] * module.gain);
            write_some<ALIGNED>(all.to + (i64)row * all.to_stride + column, row < rows ? count : 0, x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(FOURIER_THREADS, FOURIER_BLOCKS_AT_ONCE)
    fourier_eight(Fourier all) {
    fourier<true>(all);
}

extern "C" __global__ void __launch_bounds__(FOURIER_THREADS, FOURIER_BLOCKS_AT_ONCE)
    fourier_one(Fourier all) {
    fourier<false>(all);
}

// ── backward ──────────────────────────────────────────────────────────────────────────────────────

template <bool ALIGNED> __device__ __forceinline__ void fourier_grad(const Fourier &all) {
    extern __shared__ float4 shared_tile[];
    __shared__ Module shared_module;
    float *tile = (float *)shared_tile;
    const LowRank low_rank = all.low_rank;
    const i32 rows = low_rank.rows, columns = low_rank.columns;
    load_b(low_rank, blockIdx.x * FOURIER_BLOCK_COLUMNS, tile);
    if (threadIdx.x == 0)
        read_module(shared_module, all.coefficients, all.sigma, all.scale);
    __syncthreads();
    const Module module = shared_module;
    // The coefficients of (a1 + pi a2 c - pi a3 n) / s, times 4 because `rest` is (1 - u²) / 4.
    const float k1 = 4.0f * module.inverse_s * module.a[1], k = 4.0f * 3.14159265f * module.inverse_s;
    const float k2 = k * module.a[2], k3 = -k * module.a[3];
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 column_warp = warp % FOURIER_COLUMN_WARPS;
    const i32 column = blockIdx.x * FOURIER_BLOCK_COLUMNS + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
    const i32 count = columns - column, end = min(rows, (i32)(blockIdx.y + 1) * FOURIER_SLAB_ROWS);
    i32 first = blockIdx.y * FOURIER_SLAB_ROWS + warp / FOURIER_COLUMN_WARPS * FOURIER_TILE_ROWS;
    float sums[FOURIER_SUMS] = {};
    TileInputs<ALIGNED> next;
    next.read(low_rank, all.from, all.from_stride, first, column);
#pragma unroll 1
    for (; first < end; first += FOURIER_TURN_ROWS) {
        const TileInputs<ALIGNED> tile_here = next;
        if (first + FOURIER_TURN_ROWS < end)
            next.read(low_rank, all.from, all.from_stride, first + FOURIER_TURN_ROWS, column);
        float z[2][8];
        multiply(low_rank, tile, column_warp, first, tile_here.h, z);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
            float d[8];
            unpack<act>(tile_here.x[part], d);
#pragma unroll
            for (int at = 0; at < 8; ++at) {
                const float here = d[at], x = z[part][at] * module.gain;
                const Wave wave = wave_of(x);
                const float out = here * wave.rest * fmaf(k3, wave.n, fmaf(k2, wave.c, k1));
                // Elements outside the matrix have dy = 0 and add nothing.
                sums[0] += here;
                sums[1] = fmaf(here, wave.u, sums[1]);
                sums[2] = fmaf(here, wave.n, sums[2]);
                sums[3] = fmaf(here, wave.c, sums[3]);
                sums[4] = fmaf(out, x, sums[4]);
                d[at] = out;
            }
            write_some<ALIGNED>(all.to + (i64)row * all.to_stride + column, row < rows ? count : 0, d);
        }
    }
    const i64 blocks = (i64)gridDim.x * gridDim.y;
    const i64 block = (i64)blockIdx.y * gridDim.x + blockIdx.x;
#pragma unroll
    for (int at = 0; at < FOURIER_SUMS; ++at) {
        const double sum = block_sum((double)sums[at]);
        if (threadIdx.x == 0)
            all.partials[at * blocks + block] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(FOURIER_THREADS, FOURIER_BLOCKS_AT_ONCE)
    fourier_grad_eight(Fourier all) {
    fourier_grad<true>(all);
}

extern "C" __global__ void __launch_bounds__(FOURIER_THREADS, FOURIER_BLOCKS_AT_ONCE)
    fourier_grad_one(Fourier all) {
    fourier_grad<false>(all);
}

// One block per sum: blocks 0 to 3 add to the gradients of the coefficients, block 4 to that of sigma. sign(0) is 0.
extern "C" __global__ void __launch_bounds__(FOURIER_THREADS)
    fourier_grad_total(const double *partials, i64 blocks, const float *sigma, float *dcoefficients, float *dsigma) {
    const double *own = partials + (i64)blockIdx.x * blocks;
    double sum = 0.0;
#pragma unroll 4
    for (i64 at = threadIdx.x; at < blocks; at += FOURIER_THREADS)
        sum += own[at];
    sum = block_sum(sum);
    if (threadIdx.x != 0)
        return;
    if (blockIdx.x < 4) {
        dcoefficients[blockIdx.x] = (float)((double)dcoefficients[blockIdx.x] + sum);
        return;
    }
    const float value = *sigma;
    const double sign = value == 0.0f ? 0.0 : value < 0.0f ? -1.0 : 1.0;
    *dsigma = (float)((double)*dsigma - sign * sum);
}
