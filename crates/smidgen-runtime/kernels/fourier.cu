// LS-LoRA's bounded nonlinearity after B, fused with the low-rank matmul. With z = scale h Bᵀ, s = |sigma| + 1e-6,
// u = tanh(z / s), n = sin(pi u) and c = cos(pi u), and slope = (a1 + pi a2 c - pi a3 n) (1 - u²)
//     y = base + a0 + a1 u + a2 n + a3 c        dz = dy slope / s
//     da = sums of dy (1, u, n, c)              dsigma = -sign(sigma) sum of dz z / s
// z is never stored: a warp computes 16 rows by 32 columns of it with matrix instructions (bf16, f16; plain arithmetic
// for f32) and uses it at once, so forward and backward move 2 elements for each of N T, like an addition. Columns are
// assigned so that each thread owns eight neighbours.
// The five sums are f32 within a thread, f64 across threads; each block writes its own, and a second kernel adds them
// in order. `matrix_unit.cuh` comes before this text.

#define FOURIER_THREADS 256
#define FOURIER_SLAB_ROWS 128
#define FOURIER_TILE_ROWS 16
#define FOURIER_TILE_COLUMNS 32
#define FOURIER_SUMS 5

// Warps along columns and along rows: the tile of B must fit the shared memory for a rank of 256.
#if defined(ACT_F32)
#define FOURIER_COLUMN_WARPS 2
#else
#define FOURIER_COLUMN_WARPS 4
#endif
#define FOURIER_ROW_WARPS (FOURIER_THREADS / WARP / FOURIER_COLUMN_WARPS)
#define FOURIER_BLOCK_COLUMNS (FOURIER_TILE_COLUMNS * FOURIER_COLUMN_WARPS)

// ── the low-rank matmul ───────────────────────────────────────────────────────────────────────────
// A thread's part of a tile is z[0] in row `lane / 4` and z[1] eight rows below, in columns from 8 (lane % 4) on.

struct LowRank {
    const act *h; // (T, R)
    i64 h_stride;
    i32 h_pairs; // two neighbours of h can be read together
    const act *b; // (N, R)
    i64 b_stride;
    i32 rank, rows, columns;
};

#if defined(ACT_F32)

// The block's columns of B as (R, FOURIER_BLOCK_COLUMNS).
__device__ __forceinline__ void load_b(const LowRank &product, i32 first_column, float *tile) {
    for (i32 at = threadIdx.x; at < product.rank * FOURIER_BLOCK_COLUMNS; at += FOURIER_THREADS) {
        const i32 column = first_column + at % FOURIER_BLOCK_COLUMNS, k = at / FOURIER_BLOCK_COLUMNS;
        tile[at] = column < product.columns ? product.b[(i64)column * product.b_stride + k] : 0.0f;
    }
}

__device__ __forceinline__ void multiply(const LowRank &product, const float *tile, i32 column_warp, i32 row,
                                         float (&z)[2][8]) {
    const i32 lane = threadIdx.x % WARP;
    const i32 upper = row + lane / 4, lower = upper + 8;
    const float *upper_h = product.h + (i64)min(upper, product.rows - 1) * product.h_stride;
    const float *lower_h = product.h + (i64)min(lower, product.rows - 1) * product.h_stride;
    const float *b = tile + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int at = 0; at < 8; ++at)
        z[0][at] = z[1][at] = 0.0f;
#pragma unroll 4
    for (i32 k = 0; k < product.rank; ++k, b += FOURIER_BLOCK_COLUMNS) {
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

__device__ __forceinline__ u32 pair_of_b(const LowRank &product, i32 column, i32 k) {
    if (column >= product.columns)
        return 0;
    const act *b = product.b + (i64)column * product.b_stride + k;
    return (k < product.rank ? (u32)b[0].bits : 0) | (k + 1 < product.rank ? (u32)b[1].bits << 16 : 0);
}

// The block's columns of B in the layout of the matrix instruction: for each 16 of R, each warp's columns and each of
// its four tiles of eight, one word for k and one for k + 8 in every lane. Column 2q + e of tile j is column
// 8q + 2j + e of the 32, which gives lane q the results of eight neighbours.
__device__ __forceinline__ void load_b(const LowRank &product, i32 first_column, float *tile) {
    uint2 *fragments = (uint2 *)tile;
    const i32 steps = (product.rank + 15) / 16;
    for (i32 at = threadIdx.x; at < steps * FOURIER_COLUMN_WARPS * 4 * WARP; at += FOURIER_THREADS) {
        const i32 lane = at % WARP, j = at / WARP % 4, column_warp = at / (4 * WARP) % FOURIER_COLUMN_WARPS;
        const i32 k = at / (4 * WARP * FOURIER_COLUMN_WARPS) * 16 + lane % 4 * 2;
        const i32 in_warp = lane / 8 * 8 + 2 * j + lane / 4 % 2;
        const i32 column = first_column + column_warp * FOURIER_TILE_COLUMNS + in_warp;
        fragments[at] = make_uint2(pair_of_b(product, column, k), pair_of_b(product, column, k + 8));
    }
}

__device__ __forceinline__ u32 pair_of_h(const LowRank &product, i32 row, i32 k) {
    if (row >= product.rows || k >= product.rank)
        return 0;
    const act *h = product.h + (i64)row * product.h_stride + k;
    if (product.h_pairs)
        return *(const u32 *)h;
    return (u32)h[0].bits | (k + 1 < product.rank ? (u32)h[1].bits << 16 : 0);
}

__device__ __forceinline__ void multiply(const LowRank &product, const float *tile, i32 column_warp, i32 row,
                                         float (&z)[2][8]) {
    const i32 lane = threadIdx.x % WARP;
    const uint2 *fragments = (const uint2 *)tile + column_warp * 4 * WARP + lane;
    float sums[4][4] = {};
    const i32 upper = row + lane / 4, lower = upper + 8;
#pragma unroll 2
    for (i32 k = lane % 4 * 2; k < product.rank + lane % 4 * 2; k += 16) {
        const u32 a[4] = {pair_of_h(product, upper, k), pair_of_h(product, lower, k),
                          pair_of_h(product, upper, k + 8), pair_of_h(product, lower, k + 8)};
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

struct Module {
    float a0, a1, a2, a3;
    float gain;      // scale / s
    float inverse_s; // 1 / s
};

// One thread's work: the divisions are in f64, rounded once.
__device__ __forceinline__ Module read_module(const float *coefficients, const float *sigma, float scale) {
    const double s = (double)__fadd_rn(fabsf(*sigma), 1e-6f);
    return Module{coefficients[0], coefficients[1],          coefficients[2],
                  coefficients[3], (float)((double)scale / s), (float)(1.0 / s)};
}

struct Wave {
    float u, n, c;
    float rest; // 1 - u²
};

#if defined(ACT_F32)

__device__ __forceinline__ Wave wave_of(float x) {
    const float u = tanhf(x);
    return Wave{u, sinpif(u), cospif(u), (1.0f - u) * (1.0f + u)};
}

#else

// tanh x = 1 - 2 / (e^2x + 1); sin and cos of pi u by their zeros and a polynomial of degree 4 in u² (minimax, f32
// errors 3e-7 and 1.2e-6). Absolute errors are far below the rounding of 16-bit activations.
__device__ __forceinline__ Wave wave_of(float x) {
    float power, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 2.88539008f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(power + 1.0f));
    Wave wave;
    wave.u = fmaf(-2.0f, r, 1.0f);
    wave.rest = 4.0f * r * (1.0f - r);
    const float w = wave.u * wave.u;
    float p = fmaf(0.0059732916f, w, -0.07445937f);
    p = fmaf(p, w, 0.52378047f);
    p = fmaf(p, w, -2.0260837f);
    p = fmaf(p, w, 3.1415913f);
    wave.n = wave.u * (1.0f - w) * p;
    float q = fmaf(0.0051668105f, w, -0.05617124f);
    q = fmaf(q, w, 0.31908438f);
    q = fmaf(q, w, -0.9347453f);
    q = fmaf(q, w, 0.99999905f);
    wave.c = fmaf(-4.0f, w, 1.0f) * q;
    return wave;
}

#endif

// Up to eight elements, zeros past the end.
__device__ __forceinline__ void read_some(const act *from, i32 count, bool eight, float (&x)[8]) {
    if (eight && count >= 8) {
        load_eight<act>(from, x);
        return;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at)
        x[at] = at < count ? to_float(from[at]) : 0.0f;
}

__device__ __forceinline__ void write_some(act *to, i32 count, bool eight, const float (&x)[8]) {
    if (eight && count >= 8) {
        store_eight<act>(to, x);
        return;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at)
        if (at < count)
            to[at] = to_act(x[at]);
}

// ── forward ───────────────────────────────────────────────────────────────────────────────────────

// `y` may be `base`: a thread reads only the elements that it writes.
extern "C" __global__ void __launch_bounds__(FOURIER_THREADS)
    fourier(const act *base, i64 base_stride, const act *h, i64 h_stride, i32 h_pairs, const act *b, i64 b_stride,
            const float *coefficients, const float *sigma, float scale, i32 rank, i32 rows, i32 columns, i32 eight,
            act *y, i64 y_stride) {
    extern __shared__ float4 shared_tile[];
    __shared__ Module shared_module;
    float *tile = (float *)shared_tile;
    const LowRank product = {h, h_stride, h_pairs, b, b_stride, rank, rows, columns};
    load_b(product, blockIdx.x * FOURIER_BLOCK_COLUMNS, tile);
    if (threadIdx.x == 0)
        shared_module = read_module(coefficients, sigma, scale);
    __syncthreads();
    const Module module = shared_module;
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 column_warp = warp % FOURIER_COLUMN_WARPS;
    const i32 column = blockIdx.x * FOURIER_BLOCK_COLUMNS + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
    const i32 count = columns - column;
#pragma unroll 1
    for (i32 turn = warp / FOURIER_COLUMN_WARPS; turn < FOURIER_SLAB_ROWS / FOURIER_TILE_ROWS;
         turn += FOURIER_ROW_WARPS) {
        const i32 first = blockIdx.y * FOURIER_SLAB_ROWS + turn * FOURIER_TILE_ROWS;
        if (first >= rows)
            return;
        float x[2][8], z[2][8];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
            read_some(base + (i64)row * base_stride + column, row < rows ? count : 0, eight, x[part]);
        }
        multiply(product, tile, column_warp, first, z);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
#pragma unroll
            for (int at = 0; at < 8; ++at) {
                const Wave wave = wave_of(z[part][at] * module.gain);
                x[part][at] += module.a0 + module.a1 * wave.u + module.a2 * wave.n + module.a3 * wave.c;
            }
            write_some(y + (i64)row * y_stride + column, row < rows ? count : 0, eight, x[part]);
        }
    }
}

// ── backward ──────────────────────────────────────────────────────────────────────────────────────

// partials (FOURIER_SUMS, blocks): sums of dy, dy u, dy n, dy c and dz z / s.
extern "C" __global__ void __launch_bounds__(FOURIER_THREADS)
    fourier_grad(const act *h, i64 h_stride, i32 h_pairs, const act *b, i64 b_stride,
                 const float *coefficients, const float *sigma, float scale, i32 rank, const act *dy, i64 dy_stride, i32 rows, i32 columns,
                 i32 eight, act *dz, i64 dz_stride, double *partials) {
    extern __shared__ float4 shared_tile[];
    __shared__ Module shared_module;
    float *tile = (float *)shared_tile;
    const LowRank product = {h, h_stride, h_pairs, b, b_stride, rank, rows, columns};
    load_b(product, blockIdx.x * FOURIER_BLOCK_COLUMNS, tile);
    if (threadIdx.x == 0)
        shared_module = read_module(coefficients, sigma, scale);
    __syncthreads();
    const Module module = shared_module;
    const float a2_pi = 3.14159265f * module.a2, a3_pi = 3.14159265f * module.a3;
    const i32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i32 column_warp = warp % FOURIER_COLUMN_WARPS;
    const i32 column = blockIdx.x * FOURIER_BLOCK_COLUMNS + column_warp * FOURIER_TILE_COLUMNS + lane % 4 * 8;
    const i32 count = columns - column;
    float sums[FOURIER_SUMS] = {};
#pragma unroll 1
    for (i32 turn = warp / FOURIER_COLUMN_WARPS; turn < FOURIER_SLAB_ROWS / FOURIER_TILE_ROWS;
         turn += FOURIER_ROW_WARPS) {
        const i32 first = blockIdx.y * FOURIER_SLAB_ROWS + turn * FOURIER_TILE_ROWS;
        if (first >= rows)
            break;
        float d[2][8], z[2][8];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
            read_some(dy + (i64)row * dy_stride + column, row < rows ? count : 0, eight, d[part]);
        }
        multiply(product, tile, column_warp, first, z);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const i32 row = first + lane / 4 + 8 * part;
#pragma unroll
            for (int at = 0; at < 8; ++at) {
                const float here = d[part][at], x = z[part][at] * module.gain;
                const Wave wave = wave_of(x);
                const float outer = module.a1 + a2_pi * wave.c - a3_pi * wave.n;
                const float out = here * outer * (wave.rest * module.inverse_s);
                // Elements outside the matrix have dy = 0 and add nothing.
                sums[0] += here;
                sums[1] = fmaf(here, wave.u, sums[1]);
                sums[2] = fmaf(here, wave.n, sums[2]);
                sums[3] = fmaf(here, wave.c, sums[3]);
                sums[4] = fmaf(out, x, sums[4]);
                d[part][at] = out;
            }
            write_some(dz + (i64)row * dz_stride + column, row < rows ? count : 0, eight, d[part]);
        }
    }
    const i64 blocks = (i64)gridDim.x * gridDim.y;
    const i64 block = (i64)blockIdx.y * gridDim.x + blockIdx.x;
#pragma unroll
    for (int at = 0; at < FOURIER_SUMS; ++at) {
        const double sum = block_sum((double)sums[at]);
        if (threadIdx.x == 0)
            partials[at * blocks + block] = sum;
    }
}

// One block per sum: the gradients of four coefficients, and of sigma, with the sign of sigma (0 at 0).
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
