// Decays and scans of recurrent mixers. `cpu/decay.rs` and `cpu/scan_gradient.rs` have the derivations.
//
// SIDE is the side of a state, which is padded with zeros to a square. A block of 16 x 16 threads holds the state of one
// head: thread (i, j) has rows i, i + 16 … and columns j, j + 16 …, TILE of each. i is the lane within half a warp, so
// sums over rows are shuffles, and sums over columns go through shared memory. Tokens are processed one by one, each as on
// a CPU, so neither packing nor the chunks of the backward pass change a result.

#define TILE (SIDE / 16)
#define NAME_OF(name, side) name##side
#define NAMED(name, side) NAME_OF(name, side)

struct ScanShape {
    int heads, group, key_dim, value_dim, delta;
    float query_scale, key_scale;
};

struct ScanRows {
    const act *q;
    i64 q_stride;
    const act *k;
    i64 k_stride;
    const act *v;
    i64 v_stride;
    const float *g, *beta;
};

struct ScanArgs {
    ScanShape shape;
    ScanRows rows;
};

// The part of a token that a thread reads: its rows of q and k, its columns of v, and the two gates.
struct ScanToken {
    float q[TILE], k[TILE], v[TILE], keep, beta;
};

__device__ __forceinline__ float channel_of(const act *row, int channel, int channels) {
    return channel < channels ? to_float(row[channel]) : 0.0f;
}

__device__ __forceinline__ ScanToken token_of(const ScanShape &shape, const ScanRows &rows, int token, int head, int i,
                                              int j) {
    ScanToken x;
    const int key_head = head / shape.group;
    const act *q = rows.q + token * rows.q_stride + (i64)key_head * shape.key_dim;
    const act *k = rows.k + token * rows.k_stride + (i64)key_head * shape.key_dim;
    const act *v = rows.v + token * rows.v_stride + (i64)head * shape.value_dim;
#pragma unroll
    for (int a = 0; a < TILE; ++a) {
        x.q[a] = shape.query_scale * channel_of(q, i + 16 * a, shape.key_dim);
        x.k[a] = shape.key_scale * channel_of(k, i + 16 * a, shape.key_dim);
        x.v[a] = channel_of(v, j + 16 * a, shape.value_dim);
    }
    x.keep = expf(rows.g[(i64)token * shape.heads + head]);
    x.beta = rows.beta[(i64)token * shape.heads + head];
    return x;
}

// The sum over the 16 lanes of half a warp, in each of them.
__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, step);
    return x;
}

// state := keep·state + beta·k·restᵀ; leaves the rest of the thread's columns.
__device__ __forceinline__ void scan_step(const ScanShape &shape, const ScanToken &x, float (&state)[TILE][TILE],
                                          float (&rest)[TILE]) {
#pragma unroll
    for (int b = 0; b < TILE; ++b) {
        float held = 0.0f;
#pragma unroll
        for (int a = 0; a < TILE; ++a) {
            state[a][b] *= x.keep;
            held += x.k[a] * state[a][b];
        }
        rest[b] = x.v[b] - (shape.delta ? rows_sum(held) : 0.0f);
#pragma unroll
        for (int a = 0; a < TILE; ++a)
            state[a][b] += x.k[a] * (x.beta * rest[b]);
    }
}

__device__ __forceinline__ void clear_state(float (&state)[TILE][TILE]) {
#pragma unroll
    for (int a = 0; a < TILE; ++a)
#pragma unroll
        for (int b = 0; b < TILE; ++b)
            state[a][b] = 0.0f;
}

// States in the workspace have their elements in the order of threads, so that neighbours access neighbours.
__device__ __forceinline__ void store_state(float *to, const float (&state)[TILE][TILE]) {
#pragma unroll
    for (int a = 0; a < TILE; ++a)
#pragma unroll
        for (int b = 0; b < TILE; ++b)
            to[(a * TILE + b) * 256 + threadIdx.x] = state[a][b];
}

__device__ __forceinline__ void load_state(const float *from, float (&state)[TILE][TILE]) {
#pragma unroll
    for (int a = 0; a < TILE; ++a)
#pragma unroll
        for (int b = 0; b < TILE; ++b)
            state[a][b] = from[(a * TILE + b) * 256 + threadIdx.x];
}

// o of the tokens `first` to `end` of a head.
__device__ __forceinline__ void scan_tokens(const ScanShape &shape, const ScanRows &rows, int head, int first, int end,
                                            float (&state)[TILE][TILE], act *o, i64 o_stride) {
    const int i = threadIdx.x % 16, j = threadIdx.x / 16;
    for (int token = first; token < end; ++token) {
        const ScanToken x = token_of(shape, rows, token, head, i, j);
        float rest[TILE];
        scan_step(shape, x, state, rest);
        act *to = o + token * o_stride + (i64)head * shape.value_dim;
#pragma unroll
        for (int b = 0; b < TILE; ++b) {
            float read = 0.0f;
#pragma unroll
            for (int a = 0; a < TILE; ++a)
                read += x.q[a] * state[a][b];
            read = rows_sum(read);
            const int column = j + 16 * b;
            if (i == 0 && column < shape.value_dim)
                to[column] = to_act(read);
        }
    }
}

// Grid: heads, samples.
extern "C" __global__ void __launch_bounds__(256)
    NAMED(scan_, SIDE)(ScanArgs args, const i32 *boundaries, act *o, i64 o_stride) {
    float state[TILE][TILE];
    clear_state(state);
    scan_tokens(args.shape, args.rows, blockIdx.x, boundaries[blockIdx.y], boundaries[blockIdx.y + 1], state, o,
                o_stride);
}

// New tokens, from the states (L, H · K · V) of their slots. Tokens of a slot are neighbours. Grid: heads.
extern "C" __global__ void __launch_bounds__(256)
    NAMED(cached_scan_, SIDE)(ScanArgs args, const i32 *slots, const i32 *positions, float *states, act *o,
                              i64 o_stride, int tokens) {
    const ScanShape &shape = args.shape;
    const int head = blockIdx.x, i = threadIdx.x % 16, j = threadIdx.x / 16;
    const i64 floats = (i64)shape.key_dim * shape.value_dim;
    for (int first = 0, end; first < tokens; first = end) {
        for (end = first + 1; end < tokens && slots[end] == slots[first];)
            ++end;
        float *stored = states + ((i64)slots[first] * shape.heads + head) * floats;
        const bool begins = positions[first] == 0;
        float state[TILE][TILE];
#pragma unroll
        for (int a = 0; a < TILE; ++a)
#pragma unroll
            for (int b = 0; b < TILE; ++b) {
                const int row = i + 16 * a, column = j + 16 * b;
                const bool exists = row < shape.key_dim && column < shape.value_dim && !begins;
                state[a][b] = exists ? stored[(i64)row * shape.value_dim + column] : 0.0f;
            }
        scan_tokens(shape, args.rows, head, first, end, state, o, o_stride);
#pragma unroll
        for (int a = 0; a < TILE; ++a)
#pragma unroll
            for (int b = 0; b < TILE; ++b) {
                const int row = i + 16 * a, column = j + 16 * b;
                if (row < shape.key_dim && column < shape.value_dim)
                    stored[(i64)row * shape.value_dim + column] = state[a][b];
            }
    }
}

// Where the backward pass of a head has its states, and where it writes.
struct ScanGradients {
    const act *upstream;
    i64 upstream_stride;
    act *dv;
    i64 dv_stride;
    float *dg, *dbeta;
    // States at the beginnings of chunks, then those after each token of a chunk, of each head.
    float *states;
    int stored_chunks, states_of_head, chunk;
    // Gradients of queries and keys: rows (T, Hk · K) of activations, or (T, H · K) of f32 if heads share them.
    act *dq;
    i64 dq_stride;
    act *dk;
    i64 dk_stride;
    float *shared_dq, *shared_dk;
};

struct ScanGradArgs {
    ScanArgs scan;
    ScanGradients to;
};

// Sums over the columns of a state: thread (i, j) has those of its own columns in `own`; afterwards thread t < SIDE of
// each array returns the sum of row t. Sums are added in the order of j.
__device__ __forceinline__ void write_rows_of(const ScanShape &shape, const ScanGradients &to, int token, int head,
                                              float (&parts)[2][16][SIDE], const float (&dq)[TILE],
                                              const float (&dk)[TILE]) {
    const int i = threadIdx.x % 16, j = threadIdx.x / 16;
#pragma unroll
    for (int a = 0; a < TILE; ++a) {
        parts[0][j][i + 16 * a] = dq[a];
        parts[1][j][i + 16 * a] = dk[a];
    }
    __syncthreads();
    for (int item = threadIdx.x; item < 2 * shape.key_dim; item += 256) {
        const int which = item / shape.key_dim, row = item % shape.key_dim;
        float sum = 0.0f;
        for (int part = 0; part < 16; ++part)
            sum += parts[which][part][row];
        sum *= which == 0 ? shape.query_scale : shape.key_scale;
        if (to.shared_dq != nullptr) {
            float *shared = which == 0 ? to.shared_dq : to.shared_dk;
            shared[((i64)token * shape.heads + head) * shape.key_dim + row] = sum;
        } else if (which == 0) {
            to.dq[token * to.dq_stride + (i64)head * shape.key_dim + row] = to_act(sum);
        } else {
            to.dk[token * to.dk_stride + (i64)head * shape.key_dim + row] = to_act(sum);
        }
    }
    __syncthreads();
}

// Grid: heads. The samples of a head one after another.
extern "C" __global__ void __launch_bounds__(256)
    NAMED(scan_grad_, SIDE)(ScanGradArgs args, const i32 *boundaries, int samples) {
    const ScanShape &shape = args.scan.shape;
    const ScanRows &rows = args.scan.rows;
    const ScanGradients &to = args.to;
    __shared__ float parts[2][16][SIDE];
    const int head = blockIdx.x, i = threadIdx.x % 16, j = threadIdx.x / 16;
    const i64 state_floats = SIDE * SIDE;
    float *chunk_states = to.states + (i64)head * to.states_of_head * state_floats;
    float *token_states = chunk_states + (i64)to.stored_chunks * state_floats;
    float state[TILE][TILE], gradient[TILE][TILE], rest[TILE];
    for (int sample = 0; sample < samples; ++sample) {
        const int begin = boundaries[sample], end = boundaries[sample + 1];
        // No two samples are in one block at a time, so each may begin with the first stored chunk.
        const int chunks = ceil_div(end - begin, to.chunk);
        clear_state(state);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            store_state(chunk_states + chunk * state_floats, state);
            for (int token = begin + chunk * to.chunk; chunk + 1 < chunks && token < begin + (chunk + 1) * to.chunk;
                 ++token)
                scan_step(shape, token_of(shape, rows, token, head, i, j), state, rest);
        }
        clear_state(gradient);
        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
            const int first = begin + chunk * to.chunk, last = min(first + to.chunk, end);
            load_state(chunk_states + chunk * state_floats, state);
            for (int token = first; token < last; ++token) {
                scan_step(shape, token_of(shape, rows, token, head, i, j), state, rest);
                store_state(token_states + (token - first) * state_floats, state);
            }
            for (int token = last - 1; token >= first; --token) {
                const ScanToken x = token_of(shape, rows, token, head, i, j);
                const act *upstream = to.upstream + token * to.upstream_stride + (i64)head * shape.value_dim;
                float dout[TILE], dq[TILE], dk[TILE], dr[TILE], written[TILE];
                // `state` is the one after the token; `before` is the decayed one before it.
                float before[TILE][TILE];
                load_state(token == first ? chunk_states + chunk * state_floats
                                          : token_states + (token - 1 - first) * state_floats,
                           before);
#pragma unroll
                for (int b = 0; b < TILE; ++b) {
                    dout[b] = channel_of(upstream, j + 16 * b, shape.value_dim);
                    float held = 0.0f;
#pragma unroll
                    for (int a = 0; a < TILE; ++a) {
                        before[a][b] *= x.keep;
                        held += x.k[a] * before[a][b];
                    }
                    rest[b] = x.v[b] - (shape.delta ? rows_sum(held) : 0.0f);
                    written[b] = x.beta * rest[b];
                }
#pragma unroll
                for (int a = 0; a < TILE; ++a)
                    dq[a] = dk[a] = 0.0f;
                float dbeta = 0.0f, dg = 0.0f;
#pragma unroll
                for (int b = 0; b < TILE; ++b) {
                    float sum = 0.0f;
#pragma unroll
                    for (int a = 0; a < TILE; ++a) {
                        gradient[a][b] += x.q[a] * dout[b];
                        dq[a] += (before[a][b] + x.k[a] * written[b]) * dout[b];
                        dk[a] += gradient[a][b] * written[b];
                        sum += x.k[a] * gradient[a][b];
                    }
                    sum = rows_sum(sum);
                    dbeta += sum * rest[b];
                    dr[b] = x.beta * sum;
#pragma unroll
                    for (int a = 0; a < TILE; ++a) {
                        if (shape.delta) {
                            dk[a] -= before[a][b] * dr[b];
                            gradient[a][b] -= x.k[a] * dr[b];
                        }
                        dg += gradient[a][b] * before[a][b];
                        gradient[a][b] *= x.keep;
                    }
                    const int column = j + 16 * b;
                    if (i == 0 && column < shape.value_dim)
                        to.dv[token * to.dv_stride + (i64)head * shape.value_dim + column] = to_act(dr[b]);
                }
                write_rows_of(shape, to, token, head, parts, dq, dk);
                // Every lane of half a warp has the same part of dbeta.
                dg = block_sum(dg);
                dbeta = block_sum(i == 0 ? dbeta : 0.0f);
                if (threadIdx.x == 0) {
                    to.dg[(i64)token * shape.heads + head] = dg;
                    to.dbeta[(i64)token * shape.heads + head] = dbeta;
                }
            }
        }
    }
}
