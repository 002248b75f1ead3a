// Routed experts without their matmuls: which experts a token chooses and its gradient, rows sorted by expert, copies of
// rows to the experts and sums of them for the tokens.
//
// A warp has one token where scores are computed; every lane has the experts that are 32 apart. A sum over lanes has a
// fixed order, so nothing depends on the schedule. Sorting counts the choices of each block of 256 and places them in the
// order of tokens; it needs no atomics.
// Left out: the matmuls (`grouped.cuh`).

#define ROUTE_NAN __int_as_float(0x7fc00000)

struct Routing {
    i32 experts;
    i32 chosen;
    i32 sigmoid;      // scores are sigmoids, not a softmax
    i32 groups;       // 0: no groups
    i32 kept_groups;
    i32 best;         // a group counts as much as the sum of so many of its best
    i32 renormalizes;
    float added;      // to the sum by which scores are divided
    float scale;
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, step);
    return x;
}

__device__ __forceinline__ float largest_of_lanes(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, step));
    return x;
}

// The scores of a token, into shared memory.
__device__ __forceinline__ void scores_of(const Routing &routing, const act *logits, float *scores) {
    const int lane = threadIdx.x;
    if (routing.sigmoid) {
        for (int e = lane; e < routing.experts; e += WARP)
            scores[e] = 1.0f / (1.0f + expf(-to_float(logits[e])));
    } else {
        float largest = -infinity(), sum = 0.0f;
        for (int e = lane; e < routing.experts; e += WARP)
            largest = fmaxf(largest, to_float(logits[e]));
        largest = largest_of_lanes(largest);
        for (int e = lane; e < routing.experts; e += WARP) {
            scores[e] = expf(to_float(logits[e]) - largest);
            sum += scores[e];
        }
        sum = sum_of_lanes(sum);
        for (int e = lane; e < routing.experts; e += WARP)
            scores[e] = scores[e] / sum;
    }
    __syncwarp();
}

// The first index of the largest number, which is then NaN; 0 if all are NaN.
__device__ __forceinline__ int take_largest(float *numbers, int count) {
    const int lane = threadIdx.x;
    float best = 0.0f;
    int at = count;
    for (int i = lane; i < count; i += WARP)
        if (numbers[i] == numbers[i] && (at == count || numbers[i] > best))
            best = numbers[i], at = i;
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(EVERY_LANE, best, step);
        const int other_at = __shfl_xor_sync(EVERY_LANE, at, step);
        if (other_at < count && (at == count || other > best || (other == best && other_at < at)))
            best = other, at = other_at;
    }
    at = at == count ? 0 : at;
    if (lane == 0)
        numbers[at] = ROUTE_NAN;
    __syncwarp();
    return at;
}

// Rules out the experts of all groups but the best. `ranks` has room for each group.
__device__ __forceinline__ void keep_groups(const Routing &routing, float *ranked, float *ranks) {
    const int lane = threadIdx.x, size = routing.experts / routing.groups;
    for (int group = lane; group < routing.groups; group += WARP) {
        const float *of_group = ranked + group * size;
        float sum = 0.0f, before = infinity();
        int before_at = -1;
        for (int n = 0; n < min(routing.best, size); ++n) {
            float best = 0.0f;
            int at = -1;
            // Numbers are taken from the largest to the smallest, and equal ones in their order.
            for (int i = 0; i < size; ++i) {
                const bool is_left = of_group[i] < before || (of_group[i] == before && i > before_at);
                if (is_left && (at < 0 || of_group[i] > best))
                    best = of_group[i], at = i;
            }
            if (at < 0)
                break;
            sum += best, before = best, before_at = at;
        }
        ranks[group] = sum;
    }
    __syncwarp();
    for (int n = 0; n < routing.kept_groups; ++n)
        take_largest(ranks, routing.groups);
    // A group that was kept is NaN now.
    for (int e = lane; e < routing.experts; e += WARP)
        if (ranks[e / size] == ranks[e / size])
            ranked[e] = -infinity();
    __syncwarp();
}

__device__ __forceinline__ float divisor_of(const Routing &routing, const float *scores, const i32 *chosen) {
    if (!routing.renormalizes)
        return 1.0f;
    float sum = 0.0f;
    for (int j = 0; j < routing.chosen; ++j)
        sum += scores[chosen[j]];
    return sum + routing.added;
}

// Shared memory: scores, ranks of experts, ranks of groups (E floats each).
extern "C" __global__ void __launch_bounds__(32)
    route(Routing routing, const act *logits, i64 stride, const void *correction, i32 correction_type,
          const void *expert_scales, i32 scales_type, float *weights, i32 *choices) {
    extern __shared__ float route_arena[];
    float *scores = route_arena, *ranked = scores + routing.experts, *ranks = ranked + routing.experts;
    const i64 token = blockIdx.x;
    const int lane = threadIdx.x;
    scores_of(routing, logits + token * stride, scores);
    for (int e = lane; e < routing.experts; e += WARP)
        ranked[e] = scores[e] + (correction ? stored_float(correction, correction_type, e) : 0.0f);
    __syncwarp();
    if (routing.groups)
        keep_groups(routing, ranked, ranks);
    i32 *chosen = choices + token * routing.chosen;
    for (int j = 0; j < routing.chosen; ++j) {
        const int expert = take_largest(ranked, routing.experts);
        if (lane == 0)
            chosen[j] = expert;
    }
    __threadfence_block();
    __syncwarp();
    const float factor = routing.scale / divisor_of(routing, scores, chosen);
    for (int j = lane; j < routing.chosen; j += WARP) {
        const int expert = chosen[j];
        const float own = expert_scales ? stored_float(expert_scales, scales_type, expert) : 1.0f;
        weights[token * routing.chosen + j] = scores[expert] * factor * own;
    }
}

// dlogits; and, if `changes` is not null, the share of each choice in the gradient of its expert's scale.
extern "C" __global__ void __launch_bounds__(32)
    route_grad(Routing routing, const act *logits, i64 stride, const i32 *choices, const float *dweights,
               const void *expert_scales, i32 scales_type, act *dlogits, i64 d_stride, float *changes) {
    extern __shared__ float route_arena[];
    float *scores = route_arena;
    const i64 token = blockIdx.x;
    const int lane = threadIdx.x;
    scores_of(routing, logits + token * stride, scores);
    const i32 *chosen = choices + token * routing.chosen;
    const float *dw = dweights + token * routing.chosen;
    const float sum = divisor_of(routing, scores, chosen);
    auto du = [&](int j) {
        const float own = expert_scales ? stored_float(expert_scales, scales_type, chosen[j]) : 1.0f;
        return dw[j] * routing.scale * own;
    };
    float shared = 0.0f, mean = 0.0f;
    if (routing.renormalizes)
        for (int j = 0; j < routing.chosen; ++j)
            shared += du(j) * scores[chosen[j]] / sum;
    if (!routing.sigmoid)
        for (int j = 0; j < routing.chosen; ++j)
            mean += (du(j) - shared) / sum * scores[chosen[j]];
    act *row = dlogits + token * d_stride;
    for (int e = lane; e < routing.experts; e += WARP) {
        float d = 0.0f;
        for (int j = 0; j < routing.chosen; ++j)
            d = chosen[j] == e ? (du(j) - shared) / sum : d;
        row[e] = to_act(routing.sigmoid ? d * scores[e] * (1.0f - scores[e]) : (d - mean) * scores[e]);
    }
    if (changes)
        for (int j = lane; j < routing.chosen; j += WARP)
            changes[token * routing.chosen + j] = dw[j] * routing.scale * scores[chosen[j]] / sum;
}

// dscales[e] += the changes of the choices of expert e; one warp for each expert.
extern "C" __global__ void __launch_bounds__(32)
    expert_scales_grad(const i32 *choices, const float *changes, i64 count, float *dscales) {
    const int expert = blockIdx.x;
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += WARP)
        sum += choices[i] == expert ? changes[i] : 0.0f;
    sum = sum_of_lanes(sum);
    if (threadIdx.x == 0)
        dscales[expert] += sum;
}

#define DISPATCH_BLOCK 256

// counts[block][e]: choices of expert e in the block.
extern "C" __global__ void __launch_bounds__(DISPATCH_BLOCK)
    dispatch_count(const i32 *choices, i32 count, i32 experts, i32 *counts) {
    __shared__ i32 of_block[DISPATCH_BLOCK];
    const int index = blockIdx.x * DISPATCH_BLOCK + threadIdx.x;
    of_block[threadIdx.x] = index < count ? choices[index] : -1;
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += DISPATCH_BLOCK) {
        i32 sum = 0;
        for (int i = 0; i < DISPATCH_BLOCK; ++i)
            sum += of_block[i] == e;
        counts[(i64)blockIdx.x * experts + e] = sum;
    }
}

// counts[block][e] becomes the sorted row of the first choice of expert e in the block. `totals` has a number for each
// expert.
extern "C" __global__ void __launch_bounds__(DISPATCH_BLOCK)
    dispatch_offsets(i32 *counts, i32 blocks, i32 experts, i32 *totals) {
    for (int e = threadIdx.x; e < experts; e += DISPATCH_BLOCK) {
        i32 sum = 0;
        for (int block = 0; block < blocks; ++block) {
            const i32 here = counts[(i64)block * experts + e];
            counts[(i64)block * experts + e] = sum;
            sum += here;
        }
        totals[e] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        i32 sum = 0;
        for (int e = 0; e < experts; ++e) {
            const i32 here = totals[e];
            totals[e] = sum;
            sum += here;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += DISPATCH_BLOCK)
        for (int block = 0; block < blocks; ++block)
            counts[(i64)block * experts + e] += totals[e];
}

extern "C" __global__ void __launch_bounds__(DISPATCH_BLOCK)
    dispatch_place(const i32 *choices, i32 count, i32 experts, const i32 *firsts, i32 *places, i32 *sorted) {
    __shared__ i32 of_block[DISPATCH_BLOCK];
    const int index = blockIdx.x * DISPATCH_BLOCK + threadIdx.x;
    const i32 expert = index < count ? choices[index] : -1;
    of_block[threadIdx.x] = expert;
    __syncthreads();
    if (index >= count)
        return;
    i32 place = firsts[(i64)blockIdx.x * experts + expert];
    for (int i = 0; i < (int)threadIdx.x; ++i)
        place += of_block[i] == expert;
    places[index] = place;
    sorted[place] = expert;
}

// y[places[t, j]] = weights[t, j]·x[t]; `weights` may be null. A thread has N elements of a token.
template <int N>
__device__ __forceinline__ void spread(const act *x, i64 x_stride, const i32 *places, const float *weights, i32 chosen,
                                       act *y, i64 y_stride, u32 spans_of_row, u32 spans) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= spans)
        return;
    const i64 token = index / spans_of_row, column = (i64)(index % spans_of_row) * N;
    float from[N], to[N];
    load_span<N, act>(x + token * x_stride + column, from);
    for (int j = 0; j < chosen; ++j) {
        const float weight = weights ? weights[token * chosen + j] : 1.0f;
#pragma unroll
        for (int i = 0; i < N; ++i)
            to[i] = from[i] * weight;
        store_span<N, act>(y + places[token * chosen + j] * y_stride + column, to);
    }
}

// y[t] = Σ_j weights[t, j]·x[places[t, j]], in the order of j.
template <int N>
__device__ __forceinline__ void combine(const act *x, i64 x_stride, const i32 *places, const float *weights, i32 chosen,
                                        act *y, i64 y_stride, u32 spans_of_row, u32 spans) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= spans)
        return;
    const i64 token = index / spans_of_row, column = (i64)(index % spans_of_row) * N;
    float sum[N] = {};
    for (int j = 0; j < chosen; ++j) {
        const float weight = weights ? weights[token * chosen + j] : 1.0f;
        float from[N];
        load_span<N, act>(x + places[token * chosen + j] * x_stride + column, from);
#pragma unroll
        for (int i = 0; i < N; ++i)
            sum[i] += from[i] * weight;
    }
    store_span<N, act>(y + token * y_stride + column, sum);
}

#define ROWS_OF_EXPERTS(NAME, CALL, N)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(const act *x, i64 x_stride, const i32 *places, const float *weights, i32 chosen, act *y, i64 y_stride,    \
             u32 spans_of_row, u32 spans) {                                                                            \
        CALL<N>(x, x_stride, places, weights, chosen, y, y_stride, spans_of_row, spans);                               \
    }

ROWS_OF_EXPERTS(spread_rows_eight, spread, 8)
ROWS_OF_EXPERTS(spread_rows_one, spread, 1)
ROWS_OF_EXPERTS(combine_rows_eight, combine, 8)
ROWS_OF_EXPERTS(combine_rows_one, combine, 1)

// y[t, j] = a[places[t, j]]·b[t]; a warp for each choice.
extern "C" __global__ void __launch_bounds__(256)
    row_dots(const act *a, i64 a_stride, const act *b, i64 b_stride, const i32 *places, i32 chosen, i32 columns, i64 count,
             float *y) {
    const i64 index = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (index >= count)
        return;
    const act *left = a + places[index] * a_stride, *right = b + index / chosen * b_stride;
    float sum = 0.0f;
    for (int column = threadIdx.x % WARP; column < columns; column += WARP)
        sum = fmaf(to_float(left[column]), to_float(right[column]), sum);
    sum = sum_of_lanes(sum);
    if (threadIdx.x % WARP == 0)
        y[index] = sum;
}
