// The optimizer step: the norm over all gradients, AdamW with f32 or 8-bit moments, and the regularizer of LS-LoRA's
// coefficients. All f32 arithmetic is that of the CPU, operation by operation and never fused, so moments, codes and
// parameters have the same bits. Sums are f64, in order within a thread and then as a tree, on every GPU.
// Loss, report (loss, norm, clip factor, 1 if finite) and hyper (learning rate, step, loss scale) are f64 in device
// memory, so that the host need not wait between gradients and update. AdamW moves 28 bytes per parameter, or 14 with
// 8-bit moments.

#define UPDATE_THREADS 256
#define SQUARES_CHUNK 16384

// An adapter has hundreds of small tensors, and a launch costs as much as updating many of them. So a launch gets a
// table of tensors, and each block searches it for its tensor.
#define TABLE_TENSORS 56

struct UpdateTensor {
    float *parameters;
    float *gradient;
    float *first, *second;
    float *activity;
    i64 elements;
    u32 first_block;
    i32 aligned;
};

struct UpdateTable {
    i64 count;
    UpdateTensor tensors[TABLE_TENSORS];
};

// The last entry that begins at or before this block.
template <typename Table> __device__ __forceinline__ int tensor_of_block(const Table &table) {
    int low = 0, high = (int)table.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.tensors[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// ── the norm ──────────────────────────────────────────────────────────────────────────────────────

// partials[block] = the sum of squares of one chunk.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    sum_of_squares(const __grid_constant__ UpdateTable table, double *partials) {
    const UpdateTensor &tensor = table.tensors[tensor_of_block(table)];
    const i64 begin = (i64)(blockIdx.x - tensor.first_block) * SQUARES_CHUNK;
    const i32 count = (i32)min((i64)SQUARES_CHUNK, tensor.elements - begin);
    const float *from = tensor.gradient + begin;
    const i32 quads = tensor.aligned ? count / 4 : 0;
    double sums[4] = {};
    for (i32 quad = threadIdx.x; quad < quads; quad += UPDATE_THREADS) {
        const float4 x = ((const float4 *)from)[quad];
        sums[0] += (double)x.x * (double)x.x;
        sums[1] += (double)x.y * (double)x.y;
        sums[2] += (double)x.z * (double)x.z;
        sums[3] += (double)x.w * (double)x.w;
    }
    for (i32 at = quads * 4 + threadIdx.x; at < count; at += UPDATE_THREADS)
        sums[0] += (double)from[at] * (double)from[at];
    const double sum = block_sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
    if (threadIdx.x == 0)
        partials[blockIdx.x] = sum;
}

// squares[tensor] = the sum of the partials of a tensor, which are passed in place of its gradient. One block per
// tensor.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    add_partials(const __grid_constant__ UpdateTable table, double *squares) {
    const UpdateTensor &tensor = table.tensors[blockIdx.x];
    const double *partials = (const double *)tensor.gradient;
    double own = 0.0;
    for (i64 at = threadIdx.x; at < tensor.elements; at += UPDATE_THREADS)
        own += partials[at];
    const double sum = block_sum(own);
    if (threadIdx.x == 0)
        squares[blockIdx.x] = sum;
}

// `sum` plus the squares of all tensors, which the first thread of the only block adds one after the other. So the
// result does not depend on the rank or step that computed the squares.
__device__ __forceinline__ double add_in_order(double sum, const double *squares, i32 count) {
    __shared__ double some[UPDATE_THREADS];
    for (i32 first = 0; first < count; first += UPDATE_THREADS) {
        const i32 here = min(UPDATE_THREADS, count - first);
        __syncthreads();
        if ((i32)threadIdx.x < here)
            some[threadIdx.x] = squares[first + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (i32 at = 0; at < here; ++at)
                sum += some[at];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    add_squares(const double *squares, i32 count, double *to) {
    const double sum = add_in_order(0.0, squares, count);
    if (threadIdx.x == 0)
        *to = sum;
}

// One block. `more` are squares that other steps computed. A `clip` of 0 means no clipping.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    grad_norm_report(const double *loss, const double *hyper, const double *squares, i32 count,
                     const double *more, i32 more_count, float clip, double *report) {
    double sum = add_in_order(0.0, squares, count);
    sum = add_in_order(sum, more, more_count);
    if (threadIdx.x != 0)
        return;
    const double scale = hyper[2], own_loss = *loss / scale, norm = sqrt(sum) / scale;
    double factor = 1.0;
    if (clip > 0.0f) {
        const double ratio = (double)clip / (norm + 1e-6);
        factor = ratio < 1.0 ? ratio : 1.0; // 1 if the norm is NaN
    }
    report[0] = own_loss;
    report[1] = norm;
    report[2] = factor / scale;
    report[3] = isfinite(norm) && isfinite(own_loss) ? 1.0 : 0.0;
}

// to += from.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    accumulate(float *to, const float *from, i64 count) {
    const i64 begin = ((i64)blockIdx.x * UPDATE_THREADS + threadIdx.x) * 4;
    for (i64 at = begin; at < min(begin + 4, count); ++at)
        to[at] += from[at];
}

// ── AdamW ─────────────────────────────────────────────────────────────────────────────────────────

// base^exponent by squaring.
__device__ __forceinline__ double whole_power(double base, u64 exponent) {
    double result = 1.0;
    for (; exponent != 0; exponent >>= 1) {
        if (exponent & 1)
            result = __dmul_rn(result, base);
        base = __dmul_rn(base, base);
    }
    return result;
}

struct AdamwScalars {
    float clip, decay, one_minus_beta1, beta1, beta2, one_minus_beta2, correction2_root, eps, minus_step_size;
    i32 finite;
};

// Computed as on the CPU: in f64, and rounded once.
__device__ __forceinline__ AdamwScalars adamw_scalars(const double *report, const double *hyper, double beta1,
                                                      double beta2, double eps, double weight_decay) {
    const double rate = hyper[0];
    const u64 step = (u64)hyper[1];
    AdamwScalars scalars;
    scalars.finite = report[3] == 1.0;
    scalars.clip = (float)report[2];
    scalars.decay = (float)__dsub_rn(1.0, __dmul_rn(rate, weight_decay));
    scalars.one_minus_beta1 = (float)(1.0 - beta1);
    scalars.beta1 = (float)beta1;
    scalars.beta2 = (float)beta2;
    scalars.one_minus_beta2 = (float)(1.0 - beta2);
    scalars.correction2_root = (float)sqrt(__dsub_rn(1.0, whole_power(beta2, step)));
    scalars.eps = (float)eps;
    scalars.minus_step_size = (float)-(rate / (__dsub_rn(1.0, whole_power(beta1, step))));
    return scalars;
}

// Statistics of an update over the elements of a thread: the largest gradient after clipping, the largest parameter,
// and whether any parameter changed.
struct Activity {
    float gradient, parameter;
    bool moved;

    __device__ __forceinline__ void see(float clipped, float before, float after) {
        gradient = fmaxf(gradient, fabsf(clipped));
        parameter = fmaxf(parameter, fabsf(before));
        moved |= !(after == before);
    }

    // Every lane of a warp must call this. The bits of non-negative floats are ordered like the floats, so an integer
    // maximum works, and a maximum does not depend on the order. Most warps find a larger value already stored and skip
    // the atomic operation.
    __device__ __forceinline__ void store(float *tensor) const {
        const float tops[3] = {warp_max(gradient), warp_max(parameter), __any_sync(EVERY_LANE, moved) ? 1.0f : 0.0f};
        if (threadIdx.x % WARP != 0)
            return;
#pragma unroll
        for (int column = 0; column < 3; ++column)
            if (tops[column] > *(volatile float *)(tensor + column))
                atomicMax((u32 *)(tensor + column), __float_as_uint(tops[column]));
    }
};

__device__ __forceinline__ void adamw_element(const AdamwScalars &scalars, float gradient, float &parameter,
                                              float &first, float &second, Activity &activity) {
    const float g = __fmul_rn(gradient, scalars.clip);
    first = __fadd_rn(first, __fmul_rn(scalars.one_minus_beta1, __fsub_rn(g, first)));
    second = __fadd_rn(__fmul_rn(second, scalars.beta2), __fmul_rn(__fmul_rn(scalars.one_minus_beta2, g), g));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), scalars.correction2_root), scalars.eps);
    const float move = __fdiv_rn(__fmul_rn(scalars.minus_step_size, first), denominator);
    const float next = __fadd_rn(__fmul_rn(parameter, scalars.decay), move);
    activity.see(g, parameter, next);
    parameter = next;
}

extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    adamw(const __grid_constant__ UpdateTable table, const double *report, const double *hyper, double beta1,
          double beta2, double eps, double weight_decay) {
    const UpdateTensor &tensor = table.tensors[tensor_of_block(table)];
    float *parameters = tensor.parameters, *first = tensor.first, *second = tensor.second;
    const float *gradient = tensor.gradient;
    const i64 elements = tensor.elements;
    const i32 aligned = tensor.aligned;
    __shared__ AdamwScalars shared_scalars;
    if (threadIdx.x == 0)
        shared_scalars = adamw_scalars(report, hyper, beta1, beta2, eps, weight_decay);
    __syncthreads();
    const AdamwScalars scalars = shared_scalars;
    if (!scalars.finite)
        return;
    const i64 begin = ((i64)(blockIdx.x - tensor.first_block) * UPDATE_THREADS + threadIdx.x) * 4;
    Activity activity = {};
    if (aligned && begin + 4 <= elements) {
        const float4 g = *(const float4 *)(gradient + begin);
        float4 p = *(float4 *)(parameters + begin);
        float4 m = *(float4 *)(first + begin);
        float4 v = *(float4 *)(second + begin);
        adamw_element(scalars, g.x, p.x, m.x, v.x, activity);
        adamw_element(scalars, g.y, p.y, m.y, v.y, activity);
        adamw_element(scalars, g.z, p.z, m.z, v.z, activity);
        adamw_element(scalars, g.w, p.w, m.w, v.w, activity);
        *(float4 *)(parameters + begin) = p;
        *(float4 *)(first + begin) = m;
        *(float4 *)(second + begin) = v;
    } else {
        const i64 end = min(begin + 4, elements);
#pragma unroll 1
        for (i64 at = begin; at < end; ++at)
            adamw_element(scalars, gradient[at], parameters[at], first[at], second[at], activity);
    }
    activity.store(tensor.activity);
}

// ── AdamW with 8-bit moments ──────────────────────────────────────────────────────────────────────

#define MOMENT_BLOCK 256

__device__ const DynamicMap unsigned_map = dynamic_map(false);

// As bitsandbytes does: β and 1 - β in f32, the others in f64 and rounded once.
__device__ __forceinline__ AdamwScalars adamw8_scalars(const double *report, const double *hyper, double beta1,
                                                       double beta2, double eps, double weight_decay) {
    const double rate = hyper[0];
    const u64 step = (u64)hyper[1];
    AdamwScalars scalars;
    scalars.finite = report[3] == 1.0;
    scalars.clip = (float)report[2];
    scalars.beta1 = (float)beta1;
    scalars.one_minus_beta1 = __fsub_rn(1.0f, scalars.beta1);
    scalars.beta2 = (float)beta2;
    scalars.one_minus_beta2 = __fsub_rn(1.0f, scalars.beta2);
    const double correction1 = __dsub_rn(1.0, whole_power((double)scalars.beta1, step));
    const double correction2 = sqrt(__dsub_rn(1.0, whole_power((double)scalars.beta2, step)));
    scalars.correction2_root = (float)correction2;
    scalars.minus_step_size = (float)-(rate * correction2 / correction1);
    scalars.eps = (float)(correction2 * eps);
    scalars.decay = (float)__dsub_rn(1.0, __dmul_rn(rate, weight_decay));
    return scalars;
}

// A number has code c if it is above all limits before c and not above limit c. The limit is the midpoint between two
// values; a number on a midpoint gets the even code.
__device__ __forceinline__ float code_limit(const float *map, int code) {
    const float midpoint = __fmul_rn(__fadd_rn(map[code], map[code + 1]), 0.5f);
    if (code % 2 == 0)
        return midpoint;
    const u32 bits = __float_as_uint(midpoint);
    if ((bits & 0x7fffffffu) == 0)
        return __uint_as_float(0x80000001u);
    return __uint_as_float(bits >> 31 ? bits + 1 : bits - 1);
}

// The number of limits, of 255 in ascending order, that are below `number`. Limit 255 is never read.
__device__ __forceinline__ u32 nearest_code(const float *limits, float number) {
    u32 code = 0;
#pragma unroll
    for (u32 width = 128; width > 0; width /= 2)
        code += number > limits[code + width - 1] ? width : 0;
    return code;
}

struct MomentTables {
    float signed_values[256], unsigned_values[256];
    float signed_limits[256], unsigned_limits[256];
};

// A warp handles a block of 256 elements, eight in each lane.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    adamw8(const __grid_constant__ UpdateTable table, const double *report, const double *hyper, double beta1,
           double beta2, double eps, double weight_decay) {
    const UpdateTensor &tensor = table.tensors[tensor_of_block(table)];
    float *parameters = tensor.parameters, *first_largest = tensor.first, *second_largest = tensor.second;
    const float *gradient = tensor.gradient;
    const i64 elements = tensor.elements;
    const i32 aligned = tensor.aligned;
    __shared__ AdamwScalars shared_scalars;
    __shared__ MomentTables tables;
    tables.signed_values[threadIdx.x] = signed_map.at[threadIdx.x];
    tables.unsigned_values[threadIdx.x] = unsigned_map.at[threadIdx.x];
    if (threadIdx.x < 255) {
        tables.signed_limits[threadIdx.x] = code_limit(signed_map.at, threadIdx.x);
        tables.unsigned_limits[threadIdx.x] = code_limit(unsigned_map.at, threadIdx.x);
    }
    if (threadIdx.x == 0)
        shared_scalars = adamw8_scalars(report, hyper, beta1, beta2, eps, weight_decay);
    __syncthreads();
    const AdamwScalars scalars = shared_scalars;
    if (!scalars.finite)
        return;

    // A moment is one f32 per block, then one byte per element.
    const i64 blocks = (elements + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    u8 *first_codes = (u8 *)(first_largest + blocks), *second_codes = (u8 *)(second_largest + blocks);
    const i64 block = (i64)(blockIdx.x - tensor.first_block) * (UPDATE_THREADS / WARP) + threadIdx.x / WARP;
    if (block >= blocks)
        return;
    const i64 begin = block * MOMENT_BLOCK + threadIdx.x % WARP * 8;
    const i32 count = (i32)max((i64)0, min((i64)8, elements - begin));
    const bool whole = aligned && count == 8;

    // Padded with zeros, which do not change the largest magnitudes.
    float g[8] = {}, p[8] = {};
    u32 m_codes[2] = {}, v_codes[2] = {};
    if (whole) {
        load_eight<float>(gradient + begin, g);
        load_eight<float>(parameters + begin, p);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            m_codes[word] = ((const u32 *)(first_codes + begin))[word];
            v_codes[word] = ((const u32 *)(second_codes + begin))[word];
        }
    } else {
#pragma unroll
        for (int at = 0; at < 8; ++at) {
            if (at >= count)
                break;
            g[at] = gradient[begin + at];
            p[at] = parameters[begin + at];
            m_codes[at / 4] |= (u32)first_codes[begin + at] << 8 * (at % 4);
            v_codes[at / 4] |= (u32)second_codes[begin + at] << 8 * (at % 4);
        }
    }
    const float m_scale = first_largest[block], v_scale = second_largest[block];
    float m[8], v[8], m_top = 0.0f, v_top = 0.0f;
    Activity activity = {};
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        m[at] = v[at] = 0.0f;
        if (at >= count)
            continue;
        const float m_old = __fmul_rn(tables.signed_values[m_codes[at / 4] >> 8 * (at % 4) & 255], m_scale);
        const float v_old = __fmul_rn(tables.unsigned_values[v_codes[at / 4] >> 8 * (at % 4) & 255], v_scale);
        const float here = __fmul_rn(g[at], scalars.clip);
        m[at] = __fadd_rn(__fmul_rn(m_old, scalars.beta1), __fmul_rn(scalars.one_minus_beta1, here));
        const float squares = __fmul_rn(__fmul_rn(scalars.one_minus_beta2, here), here);
        v[at] = __fadd_rn(__fmul_rn(v_old, scalars.beta2), squares);
        v[at] = v[at] < 3.402823466e+38f ? v[at] : 3.402823466e+38f;
        const float ratio = __fdiv_rn(m[at], __fadd_rn(__fsqrt_rn(v[at]), scalars.eps));
        const float moved = __fadd_rn(p[at], __fmul_rn(scalars.minus_step_size, ratio));
        const float next = __fmul_rn(moved, scalars.decay);
        activity.see(here, p[at], next);
        p[at] = next;
        m_top = fmaxf(m_top, fabsf(m[at]));
        v_top = fmaxf(v_top, v[at]);
    }
    m_top = warp_max(m_top);
    v_top = warp_max(v_top);
    activity.store(tensor.activity);

    u32 m_new[2] = {}, v_new[2] = {};
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        if (m_top != 0.0f) {
            const float share = __fdiv_rn(m[at], m_top);
            u32 code = nearest_code(tables.signed_limits, share);
            // A first moment keeps its sign: a negative value is never encoded as 0.
            const bool negative = __float_as_uint(share) >> 31;
            if ((code < 127) != negative)
                code = share > 0.0f ? code + 1 : code - 1;
            m_new[at / 4] |= (code & 255) << 8 * (at % 4);
        }
        if (v_top != 0.0f)
            v_new[at / 4] |= nearest_code(tables.unsigned_limits, __fdiv_rn(v[at], v_top)) << 8 * (at % 4);
    }
    if (threadIdx.x % WARP == 0) {
        first_largest[block] = m_top;
        second_largest[block] = v_top;
    }
    if (whole) {
        store_eight<float>(parameters + begin, p);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            ((u32 *)(first_codes + begin))[word] = m_new[word];
            ((u32 *)(second_codes + begin))[word] = v_new[word];
        }
        return;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        if (at >= count)
            break;
        parameters[begin + at] = p[at];
        first_codes[begin + at] = (u8)(m_new[at / 4] >> 8 * (at % 4));
        second_codes[begin + at] = (u8)(v_new[at / 4] >> 8 * (at % 4));
    }
}

// ── zeroing and rounding ──────────────────────────────────────────────────────────────────────────

// Writes zeros, 16 words per thread.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) zero_tensors(const __grid_constant__ UpdateTable table) {
    const UpdateTensor &tensor = table.tensors[tensor_of_block(table)];
    const i64 begin = (i64)(blockIdx.x - tensor.first_block) * (16 * UPDATE_THREADS);
    const i64 end = min(begin + 16 * UPDATE_THREADS, tensor.elements);
    i64 at = begin;
    if (tensor.aligned) {
        for (i64 quad = begin / 4 + threadIdx.x; quad < end / 4; quad += UPDATE_THREADS)
            ((float4 *)tensor.gradient)[quad] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        at = end / 4 * 4;
    }
    for (at += threadIdx.x; at < end; at += UPDATE_THREADS)
        tensor.gradient[at] = 0.0f;
}

struct RoundedTensor {
    const float *from;
    act *to;
    i64 to_stride;
    i64 elements;
    i32 columns;
    float scale;
    u32 first_block;
    // Whether eight elements of a row may be written at once.
    i32 eight;
};

struct RoundTable {
    i64 count;
    RoundedTensor tensors[TABLE_TENSORS];
};

// Rounds dense matrices to matrices with rows `to_stride` apart, eight elements per thread.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) round_tensors(const __grid_constant__ RoundTable table) {
    const RoundedTensor &tensor = table.tensors[tensor_of_block(table)];
    const i64 begin = ((i64)(blockIdx.x - tensor.first_block) * UPDATE_THREADS + threadIdx.x) * 8;
    if (begin >= tensor.elements)
        return;
    if (tensor.eight) {
        float x[8];
        load_eight<float>(tensor.from + begin, x);
#pragma unroll
        for (int at = 0; at < 8; ++at)
            x[at] *= tensor.scale;
        const i64 row = begin / tensor.columns;
        store_eight<act>(tensor.to + row * tensor.to_stride + (begin - row * tensor.columns), x);
        return;
    }
    const i64 end = min(begin + 8, tensor.elements);
    for (i64 at = begin; at < end; ++at) {
        const i64 row = at / tensor.columns;
        tensor.to[row * tensor.to_stride + (at - row * tensor.columns)] = to_act(tensor.scale * tensor.from[at]);
    }
}

// to = from, eight elements per thread.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) widen(const u16 *from, float *to, u64 elements) {
    const u64 begin = ((u64)blockIdx.x * UPDATE_THREADS + threadIdx.x) * 8, end = min(begin + 8, elements);
    for (u64 at = begin; at < end; ++at)
        to[at] = __uint_as_float((u32)from[at] << 16);
}

// Stochastic rounding to bf16: a number is rounded away from zero with a probability equal to the fraction that
// truncation would drop, and towards zero otherwise.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    round_at_random(const float *from, const double *hyper, u16 *to, u64 elements, i32 columns, u64 seed,
                    u64 tensor, u64 first_row) {
    const u64 begin = ((u64)blockIdx.x * UPDATE_THREADS + threadIdx.x) * 8, end = min(begin + 8, elements);
    const u64 step_key = absorb(absorb(absorb(0, seed), (u64)hyper[1]), tensor);
    u64 row = begin / columns, key = absorb(step_key, first_row + row);
    for (u64 at = begin; at < end; ++at) {
        if (at / columns != row) {
            row = at / columns;
            key = absorb(step_key, first_row + row);
        }
        const u32 random = channel_bits(key, (u32)(at - row * columns));
        const u32 own = __float_as_uint(from[at]);
        const bool finite = (own & 0x7F800000u) != 0x7F800000u, nan = !finite && (own & 0x007FFFFFu) != 0;
        to[at] = finite ? (u16)((own + (random >> 16)) >> 16) : (u16)(own >> 16 | (nan ? 1 : 0));
    }
}

// ── LS-LoRA's coefficients ────────────────────────────────────────────────────────────────────────

// One block. loss = weight * sum (a - neutral)^2, where the neutral coefficients are (0, 1, 0, 0), and
// da += loss scale * 2 * weight * (a - neutral).
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    fourier_reg(const float *coefficients, i32 modules, double weight, const double *hyper, double *loss,
                float *dcoefficients) {
    const double scale = hyper[2];
    double sum = 0.0;
    for (i32 at = threadIdx.x; at < 4 * modules; at += UPDATE_THREADS) {
        const double away = (double)coefficients[at] - (at % 4 == 1 ? 1.0 : 0.0);
        sum += away * away;
        dcoefficients[at] = (float)((double)dcoefficients[at] + scale * (2.0 * weight * away));
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *loss = weight * sum;
}
