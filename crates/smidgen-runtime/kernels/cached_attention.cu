// Attention of new tokens over cached keys and values, and writes to the cache.
//
// A sequence has a slot; `table` (L, P) holds the cache row of each of its positions, so the rows of a sequence may be
// anywhere and sequences may share rows. Positions are taken in pieces of 256: teams of `lanes` lanes, each lane with
// eight channels, take turns over a piece, four positions at a time, each with a running maximum and sum; the results
// of the teams, and then those of the pieces, are combined in order. A block has a query and one head or up to four that
// share keys and values. It takes all pieces or, where queries are few, one of them, and `join_pieces` combines them. All
// give the same bits: the result of a query depends only on its own sequence. A position, slot or row out of range traps,
// so that nothing is read out of bounds.

// Row `table[slot, position]` of `keys` and `values` := row `token` of k and v. One block per token.
extern "C" __global__ void __launch_bounds__(256)
    cache_rows(const act *k, i64 k_stride, const act *v, i64 v_stride, const int *table, int slots_of_table,
               int positions_of_slot, const int *slots, const int *positions, act *keys, i64 keys_stride, act *values,
               i64 values_stride, int cache_rows, int columns, int aligned) {
    start_next();
    await_previous();
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
// As in `workspace_cuda.rs`.
#define PIECE 256

struct CachedAttention {
    const act *q;
    i64 q_stride;
    const act *keys;
    i64 keys_stride;
    const act *values;
    i64 values_stride;
    const int *table;
    const int *slots, *positions;
    act *o;
    i64 o_stride;
    float *pieces; // of every query, head and piece: head_dim sums, the largest score and the sum of weights
    int slots_of_table, positions_of_slot, cache_rows;
    int heads, group, head_dim, lanes;
    int window; // or 0
    float scale, softcap;
};

// The softmax of some positions: the largest score, the sum of exp(score - largest), and that times a channel of values.
struct Partial {
    float largest = -infinity(), sum = 0.0f, total = 0.0f;

    __device__ __forceinline__ void add(const Partial &next) {
        float highest = fmaxf(largest, next.largest);
        float factor = expf(largest - highest), of_next = expf(next.largest - highest);
        sum = fmaf(of_next, next.sum, __fmul_rn(factor, sum));
        total = fmaf(of_next, next.total, __fmul_rn(factor, total));
        largest = highest;
    }
};

// The softmax over positions `begin` to `end` of every head for channel `threadIdx.x`. The whole block takes part.
template <bool ALIGNED, int HEADS>
__device__ __forceinline__ void attend_to_piece(const CachedAttention &a, const act *keys, const act *values,
                                                const int *table, const float (&query)[HEADS][8], int count, int begin,
                                                int end, Partial (&all)[HEADS]) {
    // Sums over positions of exp(score - largest) * value, eight floats per thread, and their scale.
    __shared__ float weighted[HEADS][256 * 8];
    __shared__ float largest_of_team[HEADS][32], sum_of_team[HEADS][32];
    int teams = blockDim.x / a.lanes, team = threadIdx.x / a.lanes;
    float largest[HEADS], sum[HEADS] = {}, total[HEADS][8] = {};
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        largest[h] = -infinity();
    // The bounds are the same in the whole block: every lane takes part in the sums over lanes.
    for (int base = begin; base < end; base += POSITIONS_AT_ONCE * teams) {
        float value[POSITIONS_AT_ONCE][8] = {}, score[HEADS][POSITIONS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
            int here = base + i * teams + team;
            float key[8] = {};
            if (here < end) {
                int row = table[here];
                if ((u32)row >= (u32)a.cache_rows)
                    __trap();
                read_channels<ALIGNED>(keys + (i64)row * a.keys_stride, count, key);
                read_channels<ALIGNED>(values + (i64)row * a.values_stride, count, value[i]);
            }
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                float product = 0.0f;
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    product = fmaf(query[h][c], key[c], product);
                score[h][i] = product;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float higher = largest[h];
#pragma unroll
            for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
                float scaled = a.scale * lanes_sum(score[h][i], a.lanes);
                if (a.softcap > 0.0f)
                    scaled = a.softcap * tanhf(scaled / a.softcap);
                score[h][i] = base + i * teams + team < end ? scaled : -infinity();
                higher = fmaxf(higher, score[h][i]);
            }
            // A team that has seen no position yet has nothing to scale.
            if (higher > -infinity()) {
                float factor = expf(largest[h] - higher);
                sum[h] *= factor;
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    total[h][c] *= factor;
#pragma unroll
                for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
                    float weight = expf(score[h][i] - higher);
                    sum[h] += weight;
#pragma unroll
                    for (int c = 0; c < 8; ++c)
                        total[h][c] = fmaf(weight, value[i][c], total[h][c]);
                }
                largest[h] = higher;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
            weighted[h][8 * threadIdx.x + c] = total[h][c];
        if (threadIdx.x % a.lanes == 0) {
            largest_of_team[h][team] = largest[h];
            sum_of_team[h][team] = sum[h];
        }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        Partial here;
        for (int other = 0; other < teams; ++other)
            here.largest = fmaxf(here.largest, largest_of_team[h][other]);
        if (threadIdx.x < a.head_dim)
            for (int other = 0; other < teams; ++other) {
                float factor = expf(largest_of_team[h][other] - here.largest);
                here.total = fmaf(factor, weighted[h][8 * a.lanes * other + threadIdx.x], here.total);
                here.sum = fmaf(factor, sum_of_team[h][other], here.sum);
            }
        all[h].add(here);
    }
    // The next piece overwrites what was read here.
    __syncthreads();
}

__device__ __forceinline__ float *piece_of(const CachedAttention &a, int query, int head, int piece, int pieces) {
    return a.pieces + (((i64)query * a.heads + head) * pieces + piece) * (a.head_dim + 2);
}

// Positions that a query attends to; a window of 0 means no window.
__device__ __forceinline__ void range_of(const CachedAttention &a, int query, int &begin, int &end) {
    int slot = a.slots[query], position = a.positions[query];
    if ((u32)slot >= (u32)a.slots_of_table || (u32)position >= (u32)a.positions_of_slot)
        __trap();
    begin = a.window > 0 ? max(position + 1 - a.window, 0) : 0;
    end = position + 1;
}

// Grid: queries, blocks of up to HEADS heads of a group, and 1 or, if `PIECES`, all pieces.
template <bool ALIGNED, bool PIECES, int HEADS> __device__ __forceinline__ void attend(const CachedAttention &a) {
    start_next();
    await_previous();
    int token = blockIdx.x, begin, end;
    range_of(a, token, begin, end);
    int channel = 8 * (threadIdx.x % a.lanes);
    int count = min(max(a.head_dim - channel, 0), 8);
    const int *table = a.table + (i64)a.slots[token] * a.positions_of_slot;
    int blocks_of_group = ceil_div(a.group, HEADS), group = blockIdx.y / blocks_of_group;
    int first_in_group = blockIdx.y % blocks_of_group * HEADS, first_head = group * a.group + first_in_group;
    int heads_here = min(HEADS, a.group - first_in_group);
    i64 channel_of_key = (i64)group * a.head_dim + channel;
    const act *keys = a.keys + channel_of_key, *values = a.values + channel_of_key;
    int first = PIECES ? blockIdx.z : begin / PIECE, last = PIECES ? blockIdx.z : (end - 1) / PIECE;
    if (PIECES && (first < begin / PIECE || first > (end - 1) / PIECE))
        return;

    float query[HEADS][8] = {};
    Partial all[HEADS];
    const act *queries = a.q + (i64)token * a.q_stride + channel;
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        if (h < heads_here)
            read_channels<ALIGNED>(queries + (i64)(first_head + h) * a.head_dim, count, query[h]);
    for (int piece = first; piece <= last; ++piece)
        attend_to_piece<ALIGNED, HEADS>(a, keys, values, table, query, count, max(begin, piece * PIECE),
                                        min(end, (piece + 1) * PIECE), all);
    if (threadIdx.x >= a.head_dim)
        return;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        if (h >= heads_here)
            break;
        int head = first_head + h;
        if (!PIECES) {
            a.o[(i64)token * a.o_stride + (i64)head * a.head_dim + threadIdx.x] = to_act(all[h].total / all[h].sum);
            continue;
        }
        float *to = piece_of(a, token, head, blockIdx.z, gridDim.z);
        to[threadIdx.x] = all[h].total;
        if (threadIdx.x == 0) {
            to[a.head_dim] = all[h].largest;
            to[a.head_dim + 1] = all[h].sum;
        }
    }
}

// Grid: queries, heads. A thread has one channel.
extern "C" __global__ void __launch_bounds__(256) join_pieces(CachedAttention a, int pieces) {
    start_next();
    await_previous();
    int begin, end;
    range_of(a, blockIdx.x, begin, end);
    if (threadIdx.x >= a.head_dim)
        return;
    Partial all;
    for (int piece = begin / PIECE; piece <= (end - 1) / PIECE; ++piece) {
        const float *from = piece_of(a, blockIdx.x, blockIdx.y, piece, pieces);
        Partial next;
        next.largest = from[a.head_dim], next.sum = from[a.head_dim + 1], next.total = from[threadIdx.x];
        all.add(next);
    }
    a.o[(i64)blockIdx.x * a.o_stride + (i64)blockIdx.y * a.head_dim + threadIdx.x] = to_act(all.total / all.sum);
}

#define CACHED_ATTENTION_KERNEL(NAME, ...)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME(CachedAttention a) { attend<__VA_ARGS__>(a); }

CACHED_ATTENTION_KERNEL(cached_attention_eight, true, false, 1)
CACHED_ATTENTION_KERNEL(cached_attention_one, false, false, 1)
CACHED_ATTENTION_KERNEL(cached_attention_pieces_eight, true, true, 1)
CACHED_ATTENTION_KERNEL(cached_attention_pieces_one, false, true, 1)
CACHED_ATTENTION_KERNEL(cached_attention_heads_eight, true, false, 4)
CACHED_ATTENTION_KERNEL(cached_attention_heads_pieces_eight, true, true, 4)
