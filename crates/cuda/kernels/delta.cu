// Linear attention by the gated delta rule.
//
// What a layer keeps of a sequence: the last inputs of the convolution [kernel - 1, channels], then the states of the
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
    float softplus = x > 20 ? x : log1pf(expf(x));
    g.a[i] = expf(g.rates[head] * softplus);
    g.b[i] = sigmoid(g.b[i]);
}

// Tokens of a sequence between two states that are kept.
struct Stretch {
    u32 row, count;      // in the batch
    u32 start;           // tokens of the sequence before them
    u32 pad;
    const float* before; // or none: all zero
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

// What the convolution reads at place `i` of a stretch, counted from the first input that is kept.
__device__ inline float input(const DeltaArgs& d, const Stretch& s, u32 i, u32 channel) {
    u32 kept = d.kernel - 1;
    if (i >= kept) return d.qkv[(u64)(s.row + i - kept) * d.channels + channel];
    if (s.start + i < kept || !s.before) return 0;
    return s.before[(u64)i * d.channels + channel];
}

// A thread for each channel of each token: blockIdx.y is the token of a stretch or, after the last, a kept input.
extern "C" __global__ void convolve(const DeltaArgs d) {
    await_previous();
    Stretch s = d.stretches[blockIdx.z];
    u32 channel = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (channel >= d.channels) return;
    if (token < s.count) {
        float sum = 0;
        for (u32 j = 0; j < d.kernel; j++)
            sum = fmaf(d.filters[(u64)j * d.channels + channel], input(d, s, token + j, channel), sum);
        d.convolved[(u64)(s.row + token) * d.channels + channel] = silu(sum);
    }
    if (token < d.kernel - 1) s.after[(u64)token * d.channels + channel] = input(d, s, s.count + token, channel);
}

// Gives queries and keys their length; a warp for each head of each token.
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

// The recurrence of one block of columns of one head: a lane for each column, the rows dealt to the warps.
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
