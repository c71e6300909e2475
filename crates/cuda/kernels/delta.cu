// Linear attention by the gated delta rule.
//
// State of a sequence in a layer: the last inputs of the convolution [kernel - 1, channels], then the states of the
// heads in blocks of columns [value_heads, blocks, key_dim, COLUMNS].

#include "matrix.cuh"

#define COLUMNS 32
#define NORM_EPS 1e-6f

struct GatesArgs {
    float* a;
    float* b;
    const float* rates;
    const float* biases;
    u64 count;
    u32 heads;
};

// a = exp(rate * softplus(a + bias)), b = sigmoid(b)
extern "C" __global__ void delta_gates(const GatesArgs g) {
    await_previous();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= g.count) return;
    u32 head = i % g.heads;
    float x = g.a[i] + g.biases[head];
    g.a[i] = expf(g.rates[head] * softplus(x));
    g.b[i] = sigmoid(g.b[i]);
}

// Tokens of a sequence between two stored states.
struct Stretch {
    u32 row, count;      // in the batch
    u32 start;           // tokens of the sequence before them
    u32 chunk;           // the first of its chunks
    const float* before; // or null: all zeros
    float* after;
};

struct DeltaArgs {
    const Stretch* stretches;
    const float* qkv;    // [rows, channels]
    float* convolved;    // [rows, channels]
    const float* keep;   // [rows, value_heads]
    const float* correct;
    float* out;          // [rows, value_heads * value_dim]
    const float* filters; // [kernel, channels]
    u32 key_heads, value_heads, key_dim, value_dim, kernel, dealt;
    u32 channels;
};

struct ConvolveArgs {
    const Stretch* stretches;
    const float* x; // [rows, channels]
    float* out;     // [rows, channels]
    const float* filters; // [kernel, channels]
    u32 kernel, channels;
    u32 activates; // whether SiLU follows
};

// The convolution's input at index `i` of a stretch, counted from the first stored input.
__device__ inline float input(const ConvolveArgs& c, const Stretch& s, u32 i, u32 channel) {
    u32 kept = c.kernel - 1;
    if (i >= kept) return c.x[(u64)(s.row + i - kept) * c.channels + channel];
    if (s.start + i < kept || !s.before) return 0;
    return s.before[(u64)i * c.channels + channel];
}

// One thread per channel of a token. blockIdx.y is the token of a stretch or, after the last token, an input to store.
extern "C" __global__ void convolve(const ConvolveArgs c) {
    await_previous();
    Stretch s = c.stretches[blockIdx.z];
    u32 channel = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (channel >= c.channels) return;
    if (token < s.count) {
        float sum = 0;
        for (u32 j = 0; j < c.kernel; j++)
            sum = fmaf(c.filters[(u64)j * c.channels + channel], input(c, s, token + j, channel), sum);
        c.out[(u64)(s.row + token) * c.channels + channel] = c.activates ? silu(sum) : sum;
    }
    if (token < c.kernel - 1) s.after[(u64)token * c.channels + channel] = input(c, s, s.count + token, channel);
}

// Normalises queries and keys; one warp per head of a token.
extern "C" __global__ void delta_norm(const DeltaArgs d) {
    await_previous();
    Stretch s = d.stretches[blockIdx.z];
    u32 lane = threadIdx.x;
    u32 head = blockIdx.x;
    if (blockIdx.y >= s.count) return;
    float* x = d.convolved + (u64)(s.row + blockIdx.y) * d.channels + head * d.key_dim;
    float squares = 0;
    for (u32 i = lane; i < d.key_dim; i += WARP) squares = fmaf(x[i], x[i], squares);
    float length = head < d.key_heads ? 1 / sqrtf((float)d.key_dim) : 1;
    float scale = length / sqrtf(warp_sum(squares) + NORM_EPS);
    for (u32 i = lane; i < d.key_dim; i += WARP) x[i] *= scale;
}

#define RECUR_WARPS 4

// The recurrence of one block of columns of one head. Each lane has a column, and the rows are divided among the warps.
extern "C" __global__ void __launch_bounds__(RECUR_WARPS* WARP) recur(const DeltaArgs d) {
    await_previous();
    extern __shared__ float shared[];
    __shared__ float sums[2][RECUR_WARPS][COLUMNS];
    float* state = shared;                     // [key_dim, COLUMNS]
    float* q = shared + d.key_dim * COLUMNS;   // [key_dim]
    float* k = q + d.key_dim;                  // [key_dim]
    Stretch s = d.stretches[blockIdx.z];
    u32 head = blockIdx.y, block = blockIdx.x;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 blocks = (d.value_dim + COLUMNS - 1) / COLUMNS;
    u32 column = block * COLUMNS + lane;
    u32 key_head = d.dealt ? head % d.key_heads : head / (d.value_heads / d.key_heads);
    u32 keys = d.key_heads * d.key_dim;
    u64 at = (u64)(d.kernel - 1) * d.channels + ((u64)head * blocks + block) * d.key_dim * COLUMNS;
    for (u32 i = threadIdx.x; i < d.key_dim * COLUMNS; i += blockDim.x) state[i] = s.before ? s.before[at + i] : 0;

    for (u32 token = 0; token < s.count; token++) {
        u64 row = s.row + token;
        const float* channels = d.convolved + row * d.channels;
        __syncthreads();
        for (u32 i = threadIdx.x; i < d.key_dim; i += blockDim.x) {
            q[i] = channels[key_head * d.key_dim + i];
            k[i] = channels[keys + key_head * d.key_dim + i];
        }
        float v = column < d.value_dim ? channels[2 * keys + head * d.value_dim + column] : 0;
        float keep = d.keep[row * d.value_heads + head], correct = d.correct[row * d.value_heads + head];
        __syncthreads();
        float found = 0;
        for (u32 i = warp; i < d.key_dim; i += RECUR_WARPS) found = fmaf(k[i], state[i * COLUMNS + lane], found);
        sums[0][warp][lane] = found;
        __syncthreads();
        found = 0;
#pragma unroll
        for (int i = 0; i < RECUR_WARPS; i++) found += sums[0][i][lane];
        float delta = correct * (v - keep * found);
        float answer = 0;
        for (u32 i = warp; i < d.key_dim; i += RECUR_WARPS) {
            float value = fmaf(k[i], delta, keep * state[i * COLUMNS + lane]);
            state[i * COLUMNS + lane] = value;
            answer = fmaf(q[i], value, answer);
        }
        sums[1][warp][lane] = answer;
        __syncthreads();
        if (warp == 0 && column < d.value_dim) {
            answer = 0;
#pragma unroll
            for (int i = 0; i < RECUR_WARPS; i++) answer += sums[1][i][lane];
            d.out[row * d.value_heads * d.value_dim + head * d.value_dim + column] = answer;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < d.key_dim * COLUMNS; i += blockDim.x) s.after[at + i] = state[i];
}

// Many tokens, one chunk at a time. Let g be the share of the state that a token keeps, b the strength of its
// correction, and D[t][s] the product of g over the tokens after s up to t. The corrections u of a chunk that begins
// with the state S are
//
//   u[t] = b[t] (v[t] - past[t] S^T k[t] - sum over s < t of D[t][s] (k[t] . k[s]) u[s])
//
// where past[t] is the product of g up to t. This is a triangular system whose inverse does not depend on S, so the
// inverses of all chunks are computed at once. Only products remain for one chunk after the other:
//
//   u = solve (v - past K S),  out = past Q S + scores u,  S = past[last] S + K^T (rest u)
//
// with scores[t][s] = D[t][s] (q[t] . k[s]) for s up to t, and rest[t] = D[last][t].

#define CHUNK 64
#define CHUNK_THREADS 256
#define CHUNK_WARPS (CHUNK_THREADS / WARP)
// Tokens of a chunk per warp.
#define WARP_TOKENS (CHUNK / CHUNK_WARPS)

// The results for a chunk of a head that do not depend on the state.
struct Chunk {
    float solve[CHUNK][CHUNK];
    float scores[CHUNK][CHUNK];
    float past[CHUNK];
    float rest[CHUNK];
};

struct ChunkArgs {
    DeltaArgs d;
    Chunk* chunks; // [chunks, value_heads]
};

__device__ inline u32 key_head_of(const DeltaArgs& d, u32 head) {
    return d.dealt ? head % d.key_heads : head / (d.value_heads / d.key_heads);
}

// Loads queries and keys of a chunk to shared memory, in rows of `width` floats. Rows beyond its tokens are zero.
__device__ inline void load_chunk(const DeltaArgs& d, u64 row, u32 count, u32 head, u32 width, float* q, float* k) {
    u32 key_head = key_head_of(d, head), fours = d.key_dim / 4;
    for (u32 i = threadIdx.x; i < CHUNK * fours; i += CHUNK_THREADS) {
        u32 token = i / fours, channel = i % fours * 4;
        float4 nothing = {0, 0, 0, 0};
        const float* from = d.convolved + (row + token) * d.channels + key_head * d.key_dim + channel;
        *(float4*)(q + token * width + channel) = token < count ? *(const float4*)from : nothing;
        *(float4*)(k + token * width + channel) =
            token < count ? *(const float4*)(from + d.key_heads * d.key_dim) : nothing;
    }
}

__device__ inline float dot(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// One block per chunk of a head.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) delta_chunks(const ChunkArgs c) {
    await_previous();
    extern __shared__ __align__(16) float shared[];
    __shared__ float keep[CHUNK];
    __shared__ float correct[CHUNK];
    // First the products of g, then the system.
    __shared__ float system[CHUNK][CHUNK + 1];
    const DeltaArgs& d = c.d;
    Stretch s = d.stretches[blockIdx.z];
    u32 first = blockIdx.x * CHUNK, head = blockIdx.y;
    if (first >= s.count) return;
    u32 count = min(CHUNK, s.count - first);
    u64 row = s.row + first;
    Chunk& chunk = c.chunks[(u64)(s.chunk + blockIdx.x) * d.value_heads + head];
    // Rows are in different banks.
    u32 width = d.key_dim + 4;
    float* q = shared;
    float* k = shared + CHUNK * width;
    load_chunk(d, row, count, head, width, q, k);
    if (threadIdx.x < CHUNK) {
        bool there = threadIdx.x < count;
        u64 at = (row + threadIdx.x) * d.value_heads + head;
        keep[threadIdx.x] = there ? d.keep[at] : 1;
        correct[threadIdx.x] = there ? d.correct[at] : 0;
    }
    __syncthreads();
    if (threadIdx.x < CHUNK) {
        float product = 1;
        system[threadIdx.x][threadIdx.x] = 1;
        for (u32 t = threadIdx.x + 1; t < CHUNK; t++) system[t][threadIdx.x] = product *= keep[t];
        chunk.rest[threadIdx.x] = product;
    }
    __syncthreads();
    if (threadIdx.x < CHUNK) chunk.past[threadIdx.x] = keep[0] * system[threadIdx.x][0];
    __syncthreads();

    // 16 by 16 threads with 4 by 4 pairs of tokens each.
    u32 x = threadIdx.x % 16, y = threadIdx.x / 16;
    float alike[4][4] = {}, asked[4][4] = {};
    for (u32 i = 0; i < d.key_dim; i += 4) {
        float4 others[4];
#pragma unroll
        for (int n = 0; n < 4; n++) others[n] = *(const float4*)(k + (x + 16 * n) * width + i);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float4 key = *(const float4*)(k + (y + 16 * m) * width + i);
            float4 query = *(const float4*)(q + (y + 16 * m) * width + i);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                alike[m][n] = dot(key, others[n], alike[m][n]);
                asked[m][n] = dot(query, others[n], asked[m][n]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 t = y + 16 * m, other = x + 16 * n;
            float decay = other <= t ? system[t][other] : 0;
            chunk.scores[t][other] = decay * asked[m][n];
            system[t][other] = other < t ? correct[t] * decay * alike[m][n] : 0;
        }
    }
    __syncthreads();

    // One thread per column of the inverse, which overwrites queries and keys.
    if (threadIdx.x >= CHUNK) return;
    float* inverse = shared + threadIdx.x;
    for (u32 t = 0; t < CHUNK; t++) {
        float sum[4] = {};
        u32 other = 0;
        for (; other + 4 <= t; other += 4) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = fmaf(system[t][other + i], inverse[(other + i) * CHUNK], sum[i]);
        }
        for (; other < t; other++) sum[0] = fmaf(system[t][other], inverse[other * CHUNK], sum[0]);
        float value = (t == threadIdx.x) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        inverse[t * CHUNK] = value;
        chunk.solve[t][threadIdx.x] = value * correct[threadIdx.x];
    }
}

// sums[i] = rows[i] . columns, for a warp's tokens and one column. Rows have `width` floats, and columns are COLUMNS
// apart.
__device__ inline void products(const float* rows, u32 width, const float* columns, u32 length,
                                float (&sums)[WARP_TOKENS]) {
#pragma unroll 2
    for (u32 i = 0; i < length; i += 4) {
        float4 column = {columns[i * COLUMNS], columns[(i + 1) * COLUMNS], columns[(i + 2) * COLUMNS],
                         columns[(i + 3) * COLUMNS]};
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++)
            sums[t] = dot(*(const float4*)(rows + (u64)t * width + i), column, sums[t]);
    }
}

// One block of columns of one head. Each lane has a column, and the tokens of a chunk are divided among the warps.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) delta_pass(const ChunkArgs c) {
    await_previous();
    extern __shared__ __align__(16) float shared[];
    const DeltaArgs& d = c.d;
    float* state = shared;                       // [key_dim, COLUMNS]
    float* u = state + d.key_dim * COLUMNS;      // [CHUNK, COLUMNS]
    float* q = u + CHUNK * COLUMNS;              // [CHUNK, key_dim]
    float* k = q + CHUNK * d.key_dim;            // [CHUNK, key_dim]
    Stretch s = d.stretches[blockIdx.z];
    u32 head = blockIdx.y, block = blockIdx.x;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 blocks = (d.value_dim + COLUMNS - 1) / COLUMNS;
    u32 column = block * COLUMNS + lane, mine = warp * WARP_TOKENS;
    bool active = column < d.value_dim;
    u64 at = (u64)(d.kernel - 1) * d.channels + ((u64)head * blocks + block) * d.key_dim * COLUMNS;
    for (u32 i = threadIdx.x; i < d.key_dim * COLUMNS; i += CHUNK_THREADS) state[i] = s.before ? s.before[at + i] : 0;

    for (u32 first = 0; first < s.count; first += CHUNK) {
        const Chunk& chunk = c.chunks[(u64)(s.chunk + first / CHUNK) * d.value_heads + head];
        u32 count = min(CHUNK, s.count - first);
        u64 row = s.row + first;
        const float* values = d.convolved + row * d.channels + 2 * d.key_heads * d.key_dim + head * d.value_dim + column;
        __syncthreads();
        load_chunk(d, row, count, head, d.key_dim, q, k);
        __syncthreads();

        float sums[WARP_TOKENS] = {};
        products(k + mine * d.key_dim, d.key_dim, state + lane, d.key_dim, sums);
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) {
            float value = active && mine + t < count ? values[(u64)(mine + t) * d.channels] : 0;
            u[(mine + t) * COLUMNS + lane] = value - chunk.past[mine + t] * sums[t];
            sums[t] = 0;
        }
        __syncthreads();
        // Tokens after a warp's own do not contribute.
        products(chunk.solve[mine], CHUNK, u + lane, mine + WARP_TOKENS, sums);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) {
            u[(mine + t) * COLUMNS + lane] = sums[t];
            sums[t] = 0;
        }
        __syncthreads();
        products(q + mine * d.key_dim, d.key_dim, state + lane, d.key_dim, sums);
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) sums[t] *= chunk.past[mine + t];
        products(chunk.scores[mine], CHUNK, u + lane, mine + WARP_TOKENS, sums);
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) {
            u64 to = (row + mine + t) * d.value_heads * d.value_dim + head * d.value_dim + column;
            if (active && mine + t < count) d.out[to] = sums[t];
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < WARP_TOKENS; t++) u[(mine + t) * COLUMNS + lane] *= chunk.rest[mine + t];
        __syncthreads();
        float kept = chunk.past[CHUNK - 1];
        for (u32 i = 4 * warp; i < d.key_dim; i += 4 * CHUNK_WARPS) {
            float4 sum = {0, 0, 0, 0};
#pragma unroll 8
            for (u32 t = 0; t < CHUNK; t++) {
                float4 key = *(const float4*)(k + t * d.key_dim + i);
                float value = u[t * COLUMNS + lane];
                sum.x = fmaf(key.x, value, sum.x);
                sum.y = fmaf(key.y, value, sum.y);
                sum.z = fmaf(key.z, value, sum.z);
                sum.w = fmaf(key.w, value, sum.w);
            }
            float* to = state + i * COLUMNS + lane;
            to[0] = fmaf(kept, to[0], sum.x);
            to[COLUMNS] = fmaf(kept, to[COLUMNS], sum.y);
            to[2 * COLUMNS] = fmaf(kept, to[2 * COLUMNS], sum.z);
            to[3 * COLUMNS] = fmaf(kept, to[3 * COLUMNS], sum.w);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < d.key_dim * COLUMNS; i += CHUNK_THREADS) s.after[at + i] = state[i];
}
