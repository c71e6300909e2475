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
template <bool SPLIT> __device__ inline void store_halves(const Group& g, u16* to, u16* low) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 words[4], missing[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float first = weight(g, 8 * i + 2 * j), second = weight(g, 8 * i + 2 * j + 1);
            words[j] = two_halves(first, second);
            if (SPLIT)
                missing[j] =
                    two_halves(first - half_to_float(words[j] & 0xffff), second - half_to_float(words[j] >> 16));
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

// Which rows of activations a block multiplies, and with which expert.
struct Work {
    u32 expert, first, count;
};

// d = w . x for TILE_ROWS rows of a matrix from `first_row` on and up to TOKENS rows of x. SPLIT makes up for what halves
// miss in either: such products are as good as those of floats.
template <u32 KIND, int TOKENS, bool SPLIT>
__device__ inline void multiply(const GemmArgs& a, const Mat& m, u32 first_row, Work work, u16* weights, u16* xs,
                                float (&d)[TOKENS / 8][4]) {
    const int CHUNKS = (TOKENS * 8 + THREADS - 1) / THREADS;
    u16* low_weights = weights + TILE_ROWS * STRIDE;
    u16* low_xs = xs + TOKENS * STRIDE;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // A thread unpacks one group of a row in each step.
    u32 my_row = threadIdx.x / 2, my_half = threadIdx.x % 2;
    Row row = row_of(m, work.expert, min(first_row + my_row, m.rows - 1));
    u32 my_place = my_row * STRIDE + 32 * my_half, last_group = (m.cols - 1) / 32;
    // Where its share of the activations comes from.
    u64 from[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 token = (threadIdx.x + i * THREADS) / 8;
        u32 y = work.first + min(token, work.count - 1);
        from[i] = (u64)(a.sources ? a.sources[y] : y) * m.cols;
    }

    typename Unpack<KIND>::Raw raw;
    uint4 high[CHUNKS], low[CHUNKS];
    auto load = [&](u32 k) {
        // Groups and columns beyond the last are read again, and not used.
        raw = Unpack<KIND>::load(m, row, min(k / 32 + my_half, last_group));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 chunk = threadIdx.x + i * THREADS, col = k + chunk % 8 * 8;
            high[i] = low[i] = uint4{0, 0, 0, 0};
            if (chunk / 8 < work.count && col < m.cols) {
                high[i] = eight(a.x + from[i], col, m.cols);
                if (SPLIT) low[i] = eight(a.low + from[i], col, m.cols);
            }
        }
    };
    load(0);
    for (u32 k = 0; k < m.cols; k += TILE_COLS) {
        u32 index = k / 32 + my_half;
        Group g;
        Unpack<KIND>::unpack(m, raw, index, g);
        if (index > last_group) {
            g.scale[0] = g.scale[1] = g.min = 0;
#pragma unroll
            for (int i = 0; i < 32; i++) g.lane[i] = 0;
        }
        store_halves<SPLIT>(g, weights + my_place, low_weights + my_place);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 chunk = threadIdx.x + i * THREADS, place = chunk / 8 * STRIDE + chunk % 8 * 8;
            if (CHUNKS * THREADS > TOKENS * 8 && chunk >= TOKENS * 8) break;
            *(uint4*)(xs + place) = high[i];
            if (SPLIT) *(uint4*)(low_xs + place) = low[i];
        }
        __syncthreads();
        // What comes next is on its way while this is multiplied.
        if (k + TILE_COLS < m.cols) load(k + TILE_COLS);
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
}

// out[y][r] = w[r] . x[y]
template <int TOKENS, bool SPLIT> __device__ inline void gemm(const GemmArgs& a) {
    const int PARTS = SPLIT ? 2 : 1;
    __shared__ __align__(16) u16 weights[PARTS * TILE_ROWS * STRIDE];
    __shared__ __align__(16) u16 xs[PARTS * TOKENS * STRIDE];

    u32 which = 0, start = 0;
    while (blockIdx.x >= a.blocks[which]) start = a.blocks[which++];
    const Mat& m = a.w[which];
    u32 first_row = (blockIdx.x - start) * TILE_ROWS;
    Work work = {0, blockIdx.y * TOKENS, TOKENS};
    if (a.tiles) {
        if (blockIdx.y >= *a.tile_count) return;
        Tile tile = a.tiles[blockIdx.y];
        work = Work{tile.expert, tile.first, tile.count};
    } else {
        work.count = min(work.count, a.rows - work.first);
    }
    float d[TOKENS / 8][4] = {};
    // Only floats are split, and all of them are.
#define BODY(KIND)                                                                                                     \
    if constexpr ((KIND == F32 || KIND == F16 || KIND == BF16) == SPLIT)                                              \
    multiply<KIND, TOKENS, SPLIT>(a, m, first_row, work, weights, xs, d)
    WITH_KIND(m.kind, BODY)
#undef BODY

    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 token = 8 * t + lane % 4 * 2 + i % 2;
            u32 r = first_row + 16 * warp + lane / 4 + i / 2 * 8;
            if (token < work.count && r < m.rows) {
                u32 y = work.first + token;
                float scale = a.scale[a.sources ? a.sources[y] : y];
                float bias = a.bias[which] ? a.bias[which][(u64)work.expert * m.rows + r] : 0;
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
