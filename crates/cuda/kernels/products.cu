// Products with weight matrices.
//
// `matvec` reads weights once for one row of activations, in full precision: bound by memory. `gemm` unpacks a tile
// of weights to halves in shared memory for many rows and lets the tensor cores multiply.

#include "matrix.cuh"

#define VECTOR_THREADS 256
#define VECTOR_WARPS (VECTOR_THREADS / WARP)
// Activations of a group in shared memory, and room that spreads groups over the banks.
#define GROUP_STRIDE 36
// Columns whose activations are in shared memory at a time.
#define VECTOR_COLS 8192
#define MOST_PRODUCTS 4

struct DequantiseArgs {
    Mat w;
    const u32* rows; // which rows of it, if not the first ones
    float* out;      // [count, cols]
    u32 count;
};

// out[i] = w[rows[i]]
extern "C" __global__ void dequantise(const DequantiseArgs a) {
    await_previous();
    u32 groups = (a.w.cols + 31) / 32;
    u32 i = blockIdx.y;
    Row r = row_of(a.w, 0, a.rows ? a.rows[i] : i);
    for (u32 index = blockIdx.x * blockDim.x + threadIdx.x; index < groups; index += gridDim.x * blockDim.x) {
        Group g;
#define BODY(KIND) unpack_group<KIND>(a.w, r, index, g)
        WITH_KIND(a.w.kind, BODY)
#undef BODY
        u32 left = min(32, a.w.cols - 32 * index);
        float* out = a.out + (u64)i * a.w.cols + 32 * index;
#pragma unroll
        for (int lane = 0; lane < 32; lane++)
            if (lane < left) out[lane] = weight(g, lane);
    }
}

// Takes activations [first, first + cols) of a row to shared memory, those of missing columns zero.
__device__ inline void stage(float* to, const float* x, u32 cols) {
    u32 padded = (cols + 31) / 32 * 32;
    if (cols % 32 == 0 && (u64)x % 16 == 0) {
        // Several loads at a time: one after the other they would take longer than the weights.
#pragma unroll 4
        for (u32 i = threadIdx.x; i < cols / 4; i += blockDim.x)
            *(float4*)(to + i / 8 * GROUP_STRIDE + i % 8 * 4) = ((const float4*)x)[i];
        return;
    }
    for (u32 i = threadIdx.x; i < padded; i += blockDim.x)
        to[i / 32 * GROUP_STRIDE + i % 32] = i < cols ? x[i] : 0;
}

// Adds the products of some rows with the activations `x`, columns [first, first + cols), to sums, each lane its share. The
// whole block calls it: the activations go to shared memory while the first weights are on their way.
template <u32 KIND, int ROWS>
__device__ inline void multiply(const Mat& m, const Row (&rows)[ROWS], const float* x, float* shared, u32 first,
                                u32 cols, float (&sum)[ROWS]) {
    u32 groups = (cols + 31) / 32, lane = threadIdx.x % WARP;
    typename Unpack<KIND>::Raw raw[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        raw[row] = Unpack<KIND>::load(m, rows[row], first / 32 + min(lane, groups - 1));
    __syncthreads();
    stage(shared, x + first, cols);
    __syncthreads();
    for (u32 i = lane; i < groups; i += WARP) {
        typename Unpack<KIND>::Raw now[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            now[row] = raw[row];
            if (i + WARP < groups) raw[row] = Unpack<KIND>::load(m, rows[row], first / 32 + i + WARP);
        }
        Group g[ROWS];
        float part[ROWS][2] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++) Unpack<KIND>::unpack(m, now[row], first / 32 + i, g[row]);
        const float4* from = (const float4*)(shared + GROUP_STRIDE * i);
        float total = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 v = from[j];
            total += v.x + v.y + (v.z + v.w);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const float* lane = g[row].lane + 4 * j;
                float s = part[row][j / 4];
                s = fmaf(lane[0], v.x, fmaf(lane[1], v.y, s));
                part[row][j / 4] = fmaf(lane[2], v.z, fmaf(lane[3], v.w, s));
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            float sums = fmaf(g[row].scale[1], part[row][1], fmaf(-g[row].min, total, sum[row]));
            sum[row] = fmaf(g[row].scale[0], part[row][0], sums);
        }
    }
}

// Products of rows, of matrices like `m`, with `x`; the whole block calls it.
template <int ROWS>
__device__ inline void products(const Mat& m, const Row (&rows)[ROWS], const float* x, float* shared,
                                float (&sum)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum[i] = 0;
    for (u32 first = 0; first < m.cols; first += VECTOR_COLS) {
        u32 cols = min(VECTOR_COLS, m.cols - first);
#define BODY(KIND) multiply<KIND, ROWS>(m, rows, x, shared, first, cols, sum)
        WITH_KIND(m.kind, BODY)
#undef BODY
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum[i] = warp_sum(sum[i]);
}

struct MatvecArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], if there are any
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];         // floats from one row of an output to the next
    const float* x;
    u32 x_width;
    u32 share;          // so many outputs read the same row of x
    const u32* experts; // of each output, if the matrices are experts'
};

// out[y][r] = w[r] . x[y / share]
template <int ROWS> __device__ inline void matvec(const MatvecArgs& a) {
    await_previous();
    extern __shared__ float shared[];
    u32 which = 0, start = 0;
    while (blockIdx.x >= a.blocks[which]) start = a.blocks[which++];
    const Mat& m = a.w[which];
    u32 y = blockIdx.y;
    u32 expert = a.experts ? a.experts[y] : 0;
    u32 row = ((blockIdx.x - start) * VECTOR_WARPS + threadIdx.x / WARP) * ROWS;
    // Rows beyond the last repeat it.
    Row rows[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) rows[i] = row_of(m, expert, min(row + i, m.rows - 1));
    float sum[ROWS];
    products<ROWS>(m, rows, a.x + (u64)(y / a.share) * a.x_width, shared, sum);
    if (threadIdx.x % WARP) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (row + i >= m.rows) break;
        float bias = a.bias[which] ? a.bias[which][(u64)expert * m.rows + row + i] : 0;
        a.out[which][(u64)y * a.width[which] + row + i] = sum[i] + bias;
    }
}

extern "C" __global__ void __launch_bounds__(VECTOR_THREADS, 4) matvec_1(const MatvecArgs a) { matvec<1>(a); }

struct HeadsArgs {
    Mat w; // all heads' rows one after another
    const float* x;
    float* out;
    u32 heads, first, rows;   // the heads' matrices: `rows` of each head's stored rows, from `first` on
    u32 transposed;           // whether those are the columns
    u32 x_width, out_width;   // of one token
    u32 tokens;
};

// out[h] = [rest | W[h] part] with x[h] = [part | rest]; a warp for each number.
extern "C" __global__ void head_products(const HeadsArgs a) {
    await_previous();
    u32 head_dim = a.x_width / a.heads, out_dim = a.out_width / a.heads;
    u32 cols = a.transposed ? a.rows : a.w.cols;
    u32 rest = head_dim - cols;
    u32 lane = threadIdx.x % WARP;
    u32 i = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    u32 head = blockIdx.y, token = blockIdx.z;
    if (i >= out_dim) return;
    const float* x = a.x + (u64)token * a.x_width + head * head_dim;
    float* out = a.out + (u64)token * a.out_width + head * out_dim;
    if (i < rest) {
        if (lane == 0) out[i] = x[cols + i];
        return;
    }
    u32 first = head * (a.w.rows / a.heads) + a.first;
    float sum = 0;
    if (a.transposed) {
        u32 col = i - rest;
        for (u32 r = lane; r < cols; r += WARP) {
            Group g;
            Row row = row_of(a.w, 0, first + r);
            float w = 0;
#define BODY(KIND) unpack_group<KIND>(a.w, row, col / 32, g)
            WITH_KIND(a.w.kind, BODY)
#undef BODY
#pragma unroll
            for (int j = 0; j < 32; j++)
                if (j == col % 32) w = weight(g, j);
            sum = fmaf(w, x[r], sum);
        }
    } else {
        Row row = row_of(a.w, 0, first + i - rest);
        for (u32 index = lane; index < (cols + 31) / 32; index += WARP) {
            Group g;
#define BODY(KIND) unpack_group<KIND>(a.w, row, index, g)
            WITH_KIND(a.w.kind, BODY)
#undef BODY
#pragma unroll
            for (int j = 0; j < 32; j++)
                if (32 * index + j < cols) sum = fmaf(weight(g, j), x[32 * index + j], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[i] = sum;
}

struct GateUpArgs {
    Mat gate, up;
    const float* gate_bias; // [experts, inner], or none
    const float* up_bias;
    const float* x;
    float* out; // [pairs, inner]
    u32 x_width;
    u32 share;
    const u32* experts; // of each pair, or none
    float alpha, limit; // of the clamped activation; a limit of 0 is none
};

// out[y][r] = activation(gate[r] . x, up[r] . x), both matrices of the same kind; a warp for each row.
extern "C" __global__ void __launch_bounds__(VECTOR_THREADS, 2) gate_up(const GateUpArgs a) {
    await_previous();
    extern __shared__ float shared[];
    u32 y = blockIdx.y;
    u32 expert = a.experts ? a.experts[y] : 0;
    u32 row = blockIdx.x * VECTOR_WARPS + threadIdx.x / WARP;
    u32 there = min(row, a.gate.rows - 1);
    Row rows[2] = {row_of(a.gate, expert, there), row_of(a.up, expert, there)};
    float sum[2];
    products<2>(a.gate, rows, a.x + (u64)(y / a.share) * a.x_width, shared, sum);
    if (threadIdx.x % WARP || row >= a.gate.rows) return;
    u64 at = (u64)expert * a.gate.rows + row;
    float gate = sum[0] + (a.gate_bias ? a.gate_bias[at] : 0), up = sum[1] + (a.up_bias ? a.up_bias[at] : 0);
    a.out[(u64)y * a.gate.rows + row] = activate(gate, up, a.alpha, a.limit);
}
