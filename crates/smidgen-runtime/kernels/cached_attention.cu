// Attention of new tokens over cached keys and values, and writes to the cache.
//
// A sequence has a slot; `table` (L, P) holds the cache row of each of its positions, so the rows of a sequence may be
// anywhere and sequences may share rows. One block per query and head: teams of `lanes` lanes, each lane with eight
// channels, take turns over the positions, four at a time, each with a running maximum and sum; the results of the
// teams are combined in order. The result of a query depends only on its own sequence. A position, slot or row out of
// range traps, so that nothing is read out of bounds.
// Left out: sharing keys between the heads of a group and several blocks for one long sequence.

// Row `table[slot, position]` of `keys` and `values` := row `token` of k and v. One block per token.
extern "C" __global__ void __launch_bounds__(256)
    cache_rows(const act *k, i64 k_stride, const act *v, i64 v_stride, const int *table, int slots_of_table,
               int positions_of_slot, const int *slots, const int *positions, act *keys, i64 keys_stride, act *values,
               i64 values_stride, int cache_rows, int columns, int aligned) {
    int token = blockIdx.x;
    int slot = slots[token], position = positions[token];
    if ((u32)slot >= (u32)slots_of_table || (u32)position >= (u32)positions_of_slot)
        __trap();
    int row = table[(i64)slot * positions_of_slot + position];
    if ((u32)row >= (u32)cache_rows)
        __trap();
    k += (i64)token * k_stride;
    v += (i64)token * v_stride;
    keys += (i64)row * keys_stride;
    values += (i64)row * values_stride;
    if (aligned) {
        for (int column = 8 * threadIdx.x; column < columns; column += 8 * blockDim.x) {
            write_eight<act>(keys + column, read_eight<act>(k + column));
            write_eight<act>(values + column, read_eight<act>(v + column));
        }
    } else {
        for (int column = threadIdx.x; column < columns; column += blockDim.x) {
            keys[column] = k[column];
            values[column] = v[column];
        }
    }
}

// The eight channels of a lane; those beyond the head are zero.
template <bool ALIGNED> __device__ __forceinline__ void read_channels(const act *from, int count, float (&x)[8]) {
    if constexpr (ALIGNED) {
        if (count > 0)
            load_eight<act>(from, x);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            x[i] = i < count ? to_float(from[i]) : 0.0f;
    }
}

#define POSITIONS_AT_ONCE 4

template <bool ALIGNED>
__device__ __forceinline__ void attend(const act *q, i64 q_stride, const act *keys, i64 keys_stride,
                                       const act *values, i64 values_stride, const int *table, int slots_of_table,
                                       int positions_of_slot, const int *slots, const int *positions, int cache_rows,
                                       act *o, i64 o_stride, int group, int head_dim, int lanes, float scale,
                                       int window, float softcap) {
    // Sums over positions of exp(score - largest) * value, eight floats per thread, and their scale.
    __shared__ float weighted[256 * 8];
    __shared__ float largest_of_team[32], sum_of_team[32];
    int token = blockIdx.x, head = blockIdx.y;
    int teams = blockDim.x / lanes, team = threadIdx.x / lanes;
    int channel = 8 * (threadIdx.x % lanes);
    int count = min(max(head_dim - channel, 0), 8);
    int slot = slots[token], position = positions[token];
    if ((u32)slot >= (u32)slots_of_table || (u32)position >= (u32)positions_of_slot)
        __trap();
    table += (i64)slot * positions_of_slot;
    i64 channel_of_key = (i64)(head / group) * head_dim + channel;
    keys += channel_of_key;
    values += channel_of_key;
    // A window of 0 means no window.
    int begin = window > 0 ? max(position + 1 - window, 0) : 0;

    float query[8] = {};
    read_channels<ALIGNED>(q + (i64)token * q_stride + (i64)head * head_dim + channel, count, query);
    float largest = -infinity(), sum = 0.0f, total[8] = {};
    // The bounds are the same in the whole block: every lane takes part in the sums over lanes.
    for (int base = begin; base <= position; base += POSITIONS_AT_ONCE * teams) {
        float value[POSITIONS_AT_ONCE][8] = {}, score[POSITIONS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
            int here = base + i * teams + team;
            float key[8] = {};
            if (here <= position) {
                int row = table[here];
                if ((u32)row >= (u32)cache_rows)
                    __trap();
                read_channels<ALIGNED>(keys + (i64)row * keys_stride, count, key);
                read_channels<ALIGNED>(values + (i64)row * values_stride, count, value[i]);
            }
            float product = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                product += query[c] * key[c];
            score[i] = product;
        }
        float higher = largest;
#pragma unroll
        for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
            float scaled = scale * lanes_sum(score[i], lanes);
            if (softcap > 0.0f)
                scaled = softcap * tanhf(scaled / softcap);
            score[i] = base + i * teams + team <= position ? scaled : -infinity();
            higher = fmaxf(higher, score[i]);
        }
        // A team that has seen no position yet has nothing to scale.
        if (higher > -infinity()) {
            float factor = expf(largest - higher);
            sum *= factor;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                total[c] *= factor;
#pragma unroll
            for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
                float weight = expf(score[i] - higher);
                sum += weight;
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    total[c] += weight * value[i][c];
            }
            largest = higher;
        }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c)
        weighted[8 * threadIdx.x + c] = total[c];
    if (threadIdx.x % lanes == 0) {
        largest_of_team[team] = largest;
        sum_of_team[team] = sum;
    }
    __syncthreads();
    float highest = -infinity();
    for (int other = 0; other < teams; ++other)
        highest = fmaxf(highest, largest_of_team[other]);
    o += (i64)token * o_stride + (i64)head * head_dim;
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float above = 0.0f, below = 0.0f;
        for (int other = 0; other < teams; ++other) {
            float factor = expf(largest_of_team[other] - highest);
            above += factor * weighted[8 * lanes * other + column];
            below += factor * sum_of_team[other];
        }
        o[column] = to_act(above / below);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    cached_attention_eight(const act *q, i64 q_stride, const act *keys, i64 keys_stride, const act *values,
                           i64 values_stride, const int *table, int slots_of_table, int positions_of_slot,
                           const int *slots, const int *positions, int cache_rows, act *o, i64 o_stride, int group,
                           int head_dim, int lanes, float scale, int window, float softcap) {
    attend<true>(q, q_stride, keys, keys_stride, values, values_stride, table, slots_of_table, positions_of_slot,
                 slots, positions, cache_rows, o, o_stride, group, head_dim, lanes, scale, window, softcap);
}

extern "C" __global__ void __launch_bounds__(256)
    cached_attention_one(const act *q, i64 q_stride, const act *keys, i64 keys_stride, const act *values,
                         i64 values_stride, const int *table, int slots_of_table, int positions_of_slot,
                         const int *slots, const int *positions, int cache_rows, act *o, i64 o_stride, int group,
                         int head_dim, int lanes, float scale, int window, float softcap) {
    attend<false>(q, q_stride, keys, keys_stride, values, values_stride, table, slots_of_table, positions_of_slot,
                  slots, positions, cache_rows, o, o_stride, group, head_dim, lanes, scale, window, softcap);
}
