// Attention of new tokens over cached keys and values, and writes to the cache.
//
// A sequence has a slot. `table` (L, P) holds the cache row of each position of each slot, so the rows of a sequence
// may be anywhere, and sequences may share rows.
// Positions are processed in pieces of 256. Within a piece, teams of `lanes` lanes (each lane with eight channels, or with
// two times eight if heads are `_wide`, which means over 256 channels) take
// turns, four positions at a time, each team with a running maximum and sum. The results of the teams are combined in
// order, and then those of the pieces. A block per query and head processes all pieces. If there are few queries, there
// is a block for each piece instead, and `join_pieces` combines the pieces. Both give the same bits, and the result of
// a query depends only on its own sequence. A position, slot or row out of range traps, so nothing is read out of
// bounds. Left out: sharing keys between the heads of a group.

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

// Reads EIGHTS times eight channels of a lane, 256 channels apart. `count` channels of the head begin at `from`; those
// beyond the head are left as they are.
template <bool ALIGNED, int EIGHTS>
__device__ __forceinline__ void read_channels(const act *from, int count, float (&x)[EIGHTS][8]) {
#pragma unroll
    for (int part = 0; part < EIGHTS; ++part, from += 256, count -= 256) {
        if constexpr (ALIGNED) {
            if (count > 0)
                load_eight<act>(from, x[part]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count)
                    x[part][i] = to_float(from[i]);
        }
    }
}

#define POSITIONS_AT_ONCE 4
// Must match `workspace_cuda.rs`.
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
    float *pieces; // for every query, head and piece: head_dim sums, the largest score and the sum of weights
    int slots_of_table, positions_of_slot, cache_rows;
    int group, head_dim, lanes;
    int window; // 0 if there is none
    float scale, softcap;
    const void *sinks; // (H), or null
    int sinks_dtype;
};

// The unfinished softmax over some positions: the largest score, the sum of the weights exp(score - largest), and the
// sums of weight times value for a thread's channels, which are 256 apart.
template <int EIGHTS> struct Partial {
    float largest = -infinity(), sum = 0.0f, total[EIGHTS] = {};

    // Adds other positions: the sums are rescaled to the common largest score.
    __device__ __forceinline__ void add(const Partial &next) {
        float highest = fmaxf(largest, next.largest);
        float factor = expf(largest - highest), of_next = expf(next.largest - highest);
        sum = fmaf(of_next, next.sum, __fmul_rn(factor, sum));
#pragma unroll
        for (int part = 0; part < EIGHTS; ++part)
            total[part] = fmaf(of_next, next.total[part], __fmul_rn(factor, total[part]));
        largest = highest;
    }

    // Adds the sink of a head: a score without a value.
    __device__ __forceinline__ void add_sink(const CachedAttention &a, int head) {
        if (a.sinks == nullptr)
            return;
        Partial sink;
        sink.largest = stored_float(a.sinks, a.sinks_dtype, head), sink.sum = 1.0f;
        add(sink);
    }
};

// The softmax over positions `begin` to `end` for channel `threadIdx.x` of the head, and every 256th from there. The whole
// block takes part.
template <bool ALIGNED, int EIGHTS>
__device__ __forceinline__ Partial<EIGHTS> attend_to_piece(const CachedAttention &a, const act *keys,
                                                           const act *values, const int *table,
                                                           const float (&query)[EIGHTS][8], int count, int begin,
                                                           int end) {
    // For each thread, the sums of weight * value of its channels; for each team, its largest score and sum of weights.
    __shared__ float weighted[EIGHTS][256 * 8];
    __shared__ float largest_of_team[32], sum_of_team[32];
    int teams = blockDim.x / a.lanes, team = threadIdx.x / a.lanes;
    float largest = -infinity(), sum = 0.0f, total[EIGHTS][8] = {};
    // The bounds are the same in the whole block, because every lane has to take part in the sums over lanes.
    for (int base = begin; base < end; base += POSITIONS_AT_ONCE * teams) {
        float value[POSITIONS_AT_ONCE][EIGHTS][8] = {}, score[POSITIONS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
            int here = base + i * teams + team;
            float key[EIGHTS][8] = {};
            if (here < end) {
                int row = table[here];
                if ((u32)row >= (u32)a.cache_rows)
                    __trap();
                read_channels<ALIGNED, EIGHTS>(keys + (i64)row * a.keys_stride, count, key);
                read_channels<ALIGNED, EIGHTS>(values + (i64)row * a.values_stride, count, value[i]);
            }
            float product = 0.0f;
#pragma unroll
            for (int part = 0; part < EIGHTS; ++part)
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    product += query[part][c] * key[part][c];
            score[i] = product;
        }
        float higher = largest;
#pragma unroll
        for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
            float scaled = a.scale * lanes_sum(score[i], a.lanes);
            if (a.softcap > 0.0f)
                scaled = a.softcap * tanhf(scaled / a.softcap);
            score[i] = base + i * teams + team < end ? scaled : -infinity();
            higher = fmaxf(higher, score[i]);
        }
        // Skipped by a team that has had no position yet: it would compute infinity minus infinity.
        if (higher > -infinity()) {
            float factor = expf(largest - higher);
            sum *= factor;
#pragma unroll
            for (int part = 0; part < EIGHTS; ++part)
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    total[part][c] *= factor;
#pragma unroll
            for (int i = 0; i < POSITIONS_AT_ONCE; ++i) {
                float weight = expf(score[i] - higher);
                sum += weight;
#pragma unroll
                for (int part = 0; part < EIGHTS; ++part)
#pragma unroll
                    for (int c = 0; c < 8; ++c)
                        total[part][c] += weight * value[i][part][c];
            }
            largest = higher;
        }
    }
#pragma unroll
    for (int part = 0; part < EIGHTS; ++part)
#pragma unroll
        for (int c = 0; c < 8; ++c)
            weighted[part][8 * threadIdx.x + c] = total[part][c];
    if (threadIdx.x % a.lanes == 0) {
        largest_of_team[team] = largest;
        sum_of_team[team] = sum;
    }
    __syncthreads();
    Partial<EIGHTS> all;
    for (int other = 0; other < teams; ++other)
        all.largest = fmaxf(all.largest, largest_of_team[other]);
    if (threadIdx.x < a.head_dim)
        for (int other = 0; other < teams; ++other) {
            float factor = expf(largest_of_team[other] - all.largest);
#pragma unroll
            for (int part = 0; part < EIGHTS; ++part)
                all.total[part] += factor * weighted[part][8 * a.lanes * other + threadIdx.x];
            all.sum += factor * sum_of_team[other];
        }
    // The next piece overwrites the shared memory that was read here.
    __syncthreads();
    return all;
}

__device__ __forceinline__ float *piece_of(const CachedAttention &a, int query, int head, int heads, int piece,
                                           int pieces) {
    return a.pieces + (((i64)query * heads + head) * pieces + piece) * (a.head_dim + 2);
}

// The positions that a query attends to.
__device__ __forceinline__ void range_of(const CachedAttention &a, int query, int &begin, int &end) {
    int slot = a.slots[query], position = a.positions[query];
    if ((u32)slot >= (u32)a.slots_of_table || (u32)position >= (u32)a.positions_of_slot)
        __trap();
    begin = a.window > 0 ? max(position + 1 - a.window, 0) : 0;
    end = position + 1;
}

// Grid: queries, heads, and 1. With PIECES the third size is the number of pieces, and each block processes one.
template <bool ALIGNED, bool PIECES, int EIGHTS> __device__ __forceinline__ void attend(const CachedAttention &a) {
    start_next();
    await_previous();
    int token = blockIdx.x, head = blockIdx.y, begin, end;
    range_of(a, token, begin, end);
    int channel = 8 * (threadIdx.x % a.lanes);
    int count = max(a.head_dim - channel, 0);
    const int *table = a.table + (i64)a.slots[token] * a.positions_of_slot;
    i64 channel_of_key = (i64)(head / a.group) * a.head_dim + channel;
    const act *keys = a.keys + channel_of_key, *values = a.values + channel_of_key;
    int first = PIECES ? blockIdx.z : begin / PIECE, last = PIECES ? blockIdx.z : (end - 1) / PIECE;
    if (PIECES && (first < begin / PIECE || first > (end - 1) / PIECE))
        return;

    float query[EIGHTS][8] = {};
    read_channels<ALIGNED, EIGHTS>(a.q + (i64)token * a.q_stride + (i64)head * a.head_dim + channel, count, query);
    Partial<EIGHTS> all;
    for (int piece = first; piece <= last; ++piece)
        all.add(attend_to_piece<ALIGNED, EIGHTS>(a, keys, values, table, query, count, max(begin, piece * PIECE),
                                         min(end, (piece + 1) * PIECE)));
    if (threadIdx.x >= a.head_dim)
        return;
    if (!PIECES)
        all.add_sink(a, head);
    act *o = a.o + (i64)token * a.o_stride + (i64)head * a.head_dim;
    float *to = PIECES ? piece_of(a, token, head, gridDim.y, blockIdx.z, gridDim.z) : nullptr;
#pragma unroll
    for (int part = 0; part < EIGHTS; ++part) {
        const int own = threadIdx.x + 256 * part;
        if (own < a.head_dim) {
            if (PIECES)
                to[own] = all.total[part];
            else
                o[own] = to_act(all.total[part] / all.sum);
        }
    }
    if (PIECES && threadIdx.x == 0) {
        to[a.head_dim] = all.largest;
        to[a.head_dim + 1] = all.sum;
    }
}

// Combines the pieces of each query. Grid: queries, heads. A thread has every 256th channel.
extern "C" __global__ void __launch_bounds__(256) join_pieces(CachedAttention a, int pieces) {
    start_next();
    await_previous();
    int begin, end;
    range_of(a, blockIdx.x, begin, end);
    act *o = a.o + (i64)blockIdx.x * a.o_stride + (i64)blockIdx.y * a.head_dim;
    for (int channel = threadIdx.x; channel < a.head_dim; channel += 256) {
        Partial<1> all;
        for (int piece = begin / PIECE; piece <= (end - 1) / PIECE; ++piece) {
            const float *from = piece_of(a, blockIdx.x, blockIdx.y, gridDim.y, piece, pieces);
            Partial<1> next;
            next.largest = from[a.head_dim], next.sum = from[a.head_dim + 1], next.total[0] = from[channel];
            all.add(next);
        }
        all.add_sink(a, blockIdx.y);
        o[channel] = to_act(all.total[0] / all.sum);
    }
}

#define CACHED_ATTENTION_KERNEL(NAME, ...)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME(CachedAttention a) { attend<__VA_ARGS__>(a); }

CACHED_ATTENTION_KERNEL(cached_attention_eight, true, false, 1)
CACHED_ATTENTION_KERNEL(cached_attention_one, false, false, 1)
CACHED_ATTENTION_KERNEL(cached_attention_pieces_eight, true, true, 1)
CACHED_ATTENTION_KERNEL(cached_attention_pieces_one, false, true, 1)
CACHED_ATTENTION_KERNEL(cached_attention_wide_eight, true, false, 2)
CACHED_ATTENTION_KERNEL(cached_attention_wide_one, false, false, 2)
CACHED_ATTENTION_KERNEL(cached_attention_wide_pieces_eight, true, true, 2)
CACHED_ATTENTION_KERNEL(cached_attention_wide_pieces_one, false, true, 2)
