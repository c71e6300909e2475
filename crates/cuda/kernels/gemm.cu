// Products of weight matrices with many rows of activations, on the tensor cores.

#include "matrix.cuh"
#include "tensor.cuh"

#define TILE_ROWS 64
#define TILE_COLS 64
#define THREADS 128
// Halves of a row in shared memory: eight more than a tile has, so that eight rows lie in different banks.
#define STRIDE (TILE_COLS + 8)
#define MOST_PRODUCTS 4

struct HalveArgs {
    const float* x;
    u16* out;     // [rows, width]
    u16* low;     // [rows, width] what is missing in those, or none
    float* scale; // [rows] What the halves are to be multiplied with
    u32 width;
};

// Rows as halves, divided by a power of two where they would not fit.
extern "C" __global__ void halve(const HalveArgs a) {
    const float* x = a.x + (u64)blockIdx.x * a.width;
    float largest = 0;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) largest = fmaxf(largest, fabsf(x[i]));
    largest = block_max(largest);
    float scale = 1;
    while (largest > 16384 && largest < INFINITE) {
        largest *= 0.5f;
        scale *= 2;
    }
    u16* out = a.out + (u64)blockIdx.x * a.width;
    float inverse = 1 / scale;
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        float value = x[i] * inverse;
        out[i] = float_to_half(value);
        if (a.low) a.low[(u64)blockIdx.x * a.width + i] = float_to_half(value - half_to_float(out[i]));
    }
    if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
}

// Rows of one expert that are computed together.
struct Tile {
    u32 expert, first, count;
};

struct GemmArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], if there are any
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];
    const u16* x;       // [rows, cols]
    const u16* low;     // [rows, cols] what is missing in them, for weights that are floats
    const float* scale; // of the rows of x
    u32 rows;           // of the output, where there are no tiles
    const Tile* tiles;  // of experts
    const u32* tile_count;
    const u32* sources; // [rows of the output] which row of x each reads, if not its own
};

// A group of weights as halves to shared memory, and what is missing in those to `low`, if it is wanted.
template <u32 KIND, bool SPLIT>
__device__ inline void unpack_to(const Mat& m, const Row& r, u32 index, u16* to, u16* low) {
    Group g;
    Unpack<KIND>::group(m, r, index, g);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 words[4], missing[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float first = weight(g, 8 * i + 2 * j), second = weight(g, 8 * i + 2 * j + 1);
            words[j] = two_halves(first, second);
            missing[j] = two_halves(first - half_to_float(words[j] & 0xffff), second - half_to_float(words[j] >> 16));
        }
        ((uint4*)to)[i] = uint4{words[0], words[1], words[2], words[3]};
        if (SPLIT) ((uint4*)low)[i] = uint4{missing[0], missing[1], missing[2], missing[3]};
    }
}

// Eight halves of a row of activations; those beyond the last column are zero.
__device__ inline uint4 eight(const u16* x, u32 col, u32 cols) {
    if (cols % 8 == 0) return *(const uint4*)(x + col);
    uint4 words = {0, 0, 0, 0};
    u16* halves = (u16*)&words;
    for (int i = 0; i < 8 && col + i < cols; i++) halves[i] = x[col + i];
    return words;
}

// out[y][r] = w[r] . x[y] for TILE_ROWS rows of a matrix and TOKENS rows of x. SPLIT makes up for what halves miss in
// either: such products are as good as those of floats.
template <int TOKENS, bool SPLIT> __device__ inline void gemm(const GemmArgs& a) {
    const int PARTS = SPLIT ? 2 : 1;
    __shared__ __align__(16) u16 weights[PARTS * TILE_ROWS * STRIDE];
    __shared__ __align__(16) u16 xs[PARTS * TOKENS * STRIDE];
    u16* low_weights = weights + (PARTS - 1) * TILE_ROWS * STRIDE;
    u16* low_xs = xs + (PARTS - 1) * TOKENS * STRIDE;

    u32 which = 0, start = 0;
    while (blockIdx.x >= a.blocks[which]) start = a.blocks[which++];
    const Mat& m = a.w[which];
    u32 first_row = (blockIdx.x - start) * TILE_ROWS;
    u32 expert = 0, first = blockIdx.y * TOKENS, count = TOKENS;
    if (a.tiles) {
        if (blockIdx.y >= *a.tile_count) return;
        Tile tile = a.tiles[blockIdx.y];
        expert = tile.expert, first = tile.first, count = tile.count;
    } else {
        count = min(count, a.rows - first);
    }

    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // A thread unpacks one group of a row in each step.
    u32 my_row = threadIdx.x / 2, my_half = threadIdx.x % 2;
    Row row = row_of(m, expert, min(first_row + my_row, m.rows - 1));
    u16* my_weights = weights + my_row * STRIDE + 32 * my_half;
    u32 groups = (m.cols + 31) / 32;
    float d[TOKENS / 8][4] = {};

    for (u32 k = 0; k < m.cols; k += TILE_COLS) {
        u32 index = k / 32 + my_half;
        if (index < groups) {
#define BODY(KIND) unpack_to<KIND, SPLIT>(m, row, index, my_weights, my_weights + (PARTS - 1) * TILE_ROWS * STRIDE)
            WITH_KIND(m.kind, BODY)
#undef BODY
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ((uint4*)my_weights)[i] = uint4{0, 0, 0, 0};
                if (SPLIT) ((uint4*)(my_weights + TILE_ROWS * STRIDE))[i] = uint4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int chunk = threadIdx.x; chunk < TOKENS * 8; chunk += THREADS) {
            u32 token = chunk / 8, col = k + chunk % 8 * 8;
            uint4 words = {0, 0, 0, 0}, low = {0, 0, 0, 0};
            if (token < count && col < m.cols) {
                u64 source = a.sources ? a.sources[first + token] : first + token;
                words = eight(a.x + source * m.cols, col, m.cols);
                if (SPLIT) low = eight(a.low + source * m.cols, col, m.cols);
            }
            *(uint4*)(xs + token * STRIDE + chunk % 8 * 8) = words;
            if (SPLIT) *(uint4*)(low_xs + token * STRIDE + chunk % 8 * 8) = low;
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < TILE_COLS; step += 16) {
            u32 w[4], low_w[4];
            u32 at = (16 * warp + lane % 16) * STRIDE + step + lane / 16 * 8;
            load_four(w, weights + at);
            if (SPLIT) load_four(low_w, low_weights + at);
#pragma unroll
            for (int t = 0; t + 16 <= TOKENS; t += 16) {
                u32 x[4];
                u32 at = (t + lane % 8 + lane / 16 * 8) * STRIDE + step + lane / 8 % 2 * 8;
                load_four(x, xs + at);
                multiply_add(d[t / 8], w, x);
                multiply_add(d[t / 8 + 1], w, x + 2);
                if (SPLIT) {
                    multiply_add(d[t / 8], low_w, x);
                    multiply_add(d[t / 8 + 1], low_w, x + 2);
                    load_four(x, low_xs + at);
                    multiply_add(d[t / 8], w, x);
                    multiply_add(d[t / 8 + 1], w, x + 2);
                }
            }
            if (TOKENS % 16) {
                u32 x[2];
                u32 at = (TOKENS - 8 + lane % 8) * STRIDE + step + lane / 8 % 2 * 8;
                load_two(x, xs + at);
                multiply_add(d[TOKENS / 8 - 1], w, x);
                if (SPLIT) {
                    multiply_add(d[TOKENS / 8 - 1], low_w, x);
                    load_two(x, low_xs + at);
                    multiply_add(d[TOKENS / 8 - 1], w, x);
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int t = 0; t < TOKENS / 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 token = 8 * t + lane % 4 * 2 + i % 2;
            u32 r = first_row + 16 * warp + lane / 4 + i / 2 * 8;
            if (token < count && r < m.rows) {
                u32 y = first + token;
                float scale = a.scale[a.sources ? a.sources[y] : y];
                float bias = a.bias[which] ? a.bias[which][(u64)expert * m.rows + r] : 0;
                a.out[which][(u64)y * a.width[which] + r] = fmaf(d[t][i], scale, bias);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_8(const GemmArgs a) { gemm<8, false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_32(const GemmArgs a) { gemm<32, false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_64(const GemmArgs a) { gemm<64, false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_8(const GemmArgs a) { gemm<8, true>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_32(const GemmArgs a) { gemm<32, true>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_64(const GemmArgs a) { gemm<64, true>(a); }
