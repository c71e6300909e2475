// Products of weight matrices with many rows of activations, on the tensor cores.

#include "matrix.cuh"
#include "tensor.cuh"

#define THREADS 128
#define WARPS (THREADS / WARP)
// Columns that a warp multiplies per step.
#define WARP_COLS 64

struct HalveArgs {
    const float* x;
    u16* out;     // [rows, width]
    u16* low;     // [rows, width] the remainders of those, or null
    float* scale; // [rows] the scale of the f16
    u32 width;
    const u32* experts; // of each row, or null: then all rows are converted
    const u64* slots;   // [experts] the address of each expert's slot, 0 if it has none
};

// Converts rows to f16, divided by a power of two if they would overflow.
extern "C" __global__ void halve(const HalveArgs a) {
    await_previous();
    if (a.experts && !a.slots[a.experts[blockIdx.x]]) return;
    const float* x = a.x + (u64)blockIdx.x * a.width;
    float largest = 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) largest = fmaxf(largest, fabsf(x[i]));
    largest = block_max(largest);
    float scale = 1;
    while (largest > 16384 && largest < INFINITE) {
        largest *= 0.5f;
        scale *= 2;
    }
    u16* out = a.out + (u64)blockIdx.x * a.width;
    float inverse = 1 / scale;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) {
        float value = x[i] * inverse;
        out[i] = float_to_half(value);
        if (a.low) a.low[(u64)blockIdx.x * a.width + i] = float_to_half(value - half_to_float(out[i]));
    }
    if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
}

struct GemmArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], or null
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];
    const u16* x;       // [rows, cols]
    const u16* low;     // [rows, cols] their remainders, for float weights
    const float* scale; // of the rows of x
    u32 rows;           // of the output, if there are no tiles
    const Tile* tiles;  // of experts
    const u32* tile_count;
    const u32* sources; // [rows of the output] the row of x that each reads, or null for its own
};

// Stores a group of weights in shared memory as f16, and the remainders in `low`, if needed.
template <bool SPLIT> __device__ inline void store_halves(const Group& g, u16* to, u16* low) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 words[4], missing[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = 8 * i + 2 * j;
            float scale = g.scale[i / 2], min = g.min[i / 2];
            float first = fmaf(scale, g.lane[at], -min), second = fmaf(scale, g.lane[at + 1], -min);
            words[j] = two_halves(first, second);
            if (SPLIT)
                missing[j] =
                    two_halves(first - half_to_float(words[j] & 0xffff), second - half_to_float(words[j] >> 16));
        }
        ((uint4*)to)[i] = uint4{words[0], words[1], words[2], words[3]};
        if (SPLIT) ((uint4*)low)[i] = uint4{missing[0], missing[1], missing[2], missing[3]};
    }
}

// Eight f16 of a row of activations; those beyond the last column are zero.
__device__ inline uint4 eight(const u16* x, u32 col, u32 cols) {
    if (cols % 8 == 0) return *(const uint4*)(x + col);
    uint4 words = {0, 0, 0, 0};
    u16* halves = (u16*)&words;
    for (int i = 0; i < 8 && col + i < cols; i++) halves[i] = x[col + i];
    return words;
}

// The rows of activations of a block, and their expert.
struct Work {
    u32 expert, first, count;
};

// How a block's warps divide the work: ROW_TILES of 16 rows each, and the columns of a step among the remaining warps.
// With few rows of activations there is little work per weight, so more warps share the columns. Then there are fewer
// steps, each of which waits for memory, and more blocks.
template <int TOKENS, int ROW_TILES> struct Plan {
    static const int TILE_ROWS = 16 * ROW_TILES;
    static const int COL_PARTS = WARPS / ROW_TILES;
    static const int TILE_COLS = WARP_COLS * COL_PARTS;
    // f16 per row in shared memory: eight more than a tile has, so that eight rows are in different banks.
    static const int STRIDE = TILE_COLS + 8;
    static const int HALVES = (TILE_ROWS + TOKENS) * STRIDE;
};

// d = w . x for a tile of matrix rows from `first_row` on and up to TOKENS rows of x. SPLIT also multiplies the
// remainders of both, so the product is as precise as in f32.
template <u32 KIND, int TOKENS, bool SPLIT, int ROW_TILES>
__device__ inline void multiply(const GemmArgs& a, const Mat& m, u64 slot, u32 first_row, Work work, u16* weights,
                                float (&d)[TOKENS / 8][4]) {
    typedef Plan<TOKENS, ROW_TILES> P;
    const int GROUPS = P::TILE_COLS / 32, EIGHTS = P::TILE_COLS / 8, STRIDE = P::STRIDE;
    const int CHUNKS = TOKENS * EIGHTS / THREADS;
    u16* xs = weights + P::TILE_ROWS * STRIDE;
    u16* low_weights = weights + P::HALVES;
    u16* low_xs = xs + P::HALVES;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 row_tile = warp % ROW_TILES, first_col = warp / ROW_TILES * WARP_COLS;
    // Each thread unpacks one group of a row per step.
    u32 my_row = threadIdx.x / GROUPS, my_group = threadIdx.x % GROUPS;
    Row row = row_of(m, slot, min(first_row + my_row, m.rows - 1));
    u32 my_place = my_row * STRIDE + 32 * my_group, last_group = (m.cols - 1) / 32;
    // Where its part of the activations comes from.
    u64 from[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 token = (threadIdx.x + i * THREADS) / EIGHTS;
        u32 y = work.first + min(token, work.count - 1);
        from[i] = (u64)(a.sources ? a.sources[y] : y) * m.cols;
    }

    typename Unpack<KIND>::Raw raw;
    uint4 high[CHUNKS], low[CHUNKS];
    auto load = [&](u32 k) {
        // Groups and columns beyond the last repeat it and are not used.
        raw = Unpack<KIND>::load(m, row, min(k / 32 + my_group, last_group));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 chunk = threadIdx.x + i * THREADS, col = k + chunk % EIGHTS * 8;
            high[i] = low[i] = uint4{0, 0, 0, 0};
            if (chunk / EIGHTS < work.count && col < m.cols) {
                high[i] = eight(a.x + from[i], col, m.cols);
                if (SPLIT) low[i] = eight(a.low + from[i], col, m.cols);
            }
        }
    };
    load(0);
    for (u32 k = 0; k < m.cols; k += P::TILE_COLS) {
        u32 index = k / 32 + my_group;
        Group g;
        Unpack<KIND>::unpack(m, raw, index, g);
        if (index > last_group) {
            g.scale[0] = g.scale[1] = g.min[0] = g.min[1] = 0;
#pragma unroll
            for (int i = 0; i < 32; i++) g.lane[i] = 0;
        }
        store_halves<SPLIT>(g, weights + my_place, low_weights + my_place);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 chunk = threadIdx.x + i * THREADS, place = chunk / EIGHTS * STRIDE + chunk % EIGHTS * 8;
            *(uint4*)(xs + place) = high[i];
            if (SPLIT) *(uint4*)(low_xs + place) = low[i];
        }
        __syncthreads();
        // Loads the next columns while these are multiplied.
        if (k + P::TILE_COLS < m.cols) load(k + P::TILE_COLS);
#pragma unroll
        for (int step = 0; step < WARP_COLS; step += 16) {
            u32 w[4], low_w[4];
            u32 at = (16 * row_tile + lane % 16) * STRIDE + first_col + step + lane / 16 * 8;
            load_four(w, weights + at);
            if (SPLIT) load_four(low_w, low_weights + at);
#pragma unroll
            for (int t = 0; t + 16 <= TOKENS; t += 16) {
                u32 x[4];
                u32 at = (t + lane % 8 + lane / 16 * 8) * STRIDE + first_col + step + lane / 8 % 2 * 8;
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
                u32 at = (TOKENS - 8 + lane % 8) * STRIDE + first_col + step + lane / 8 % 2 * 8;
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
template <int TOKENS, bool SPLIT, int ROW_TILES> __device__ inline void gemm(const GemmArgs& a) {
    await_previous();
    typedef Plan<TOKENS, ROW_TILES> P;
    __shared__ __align__(16) u16 shared[(SPLIT ? 2 : 1) * P::HALVES];

    u32 which = 0, start = 0;
    while (blockIdx.x >= a.blocks[which]) start = a.blocks[which++];
    const Mat& m = a.w[which];
    u32 first_row = (blockIdx.x - start) * P::TILE_ROWS;
    Work work = {0, blockIdx.y * TOKENS, TOKENS};
    u64 slot = 0;
    if (a.tiles) {
        if (blockIdx.y >= *a.tile_count) return;
        Tile tile = a.tiles[blockIdx.y];
        slot = slot_of(m, tile.expert);
        if (absent(m, slot)) return;
        work = Work{tile.expert, tile.first, tile.count};
    } else {
        work.count = min(work.count, a.rows - work.first);
    }
    float d[TOKENS / 8][4] = {};
    // Only float weights are split, and they always are.
#define BODY(KIND)                                                                                                     \
    if constexpr ((KIND == F32 || KIND == F16 || KIND == BF16) == SPLIT)                                              \
    multiply<KIND, TOKENS, SPLIT, ROW_TILES>(a, m, slot, first_row, work, shared, d)
    WITH_KIND(m.kind, BODY)
#undef BODY

    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 row_tile = warp % ROW_TILES, part = warp / ROW_TILES;
    if (P::COL_PARTS > 1) {
        // Collects the sums of the other warps' columns through shared memory, in order.
        float* sums = (float*)shared;
        if (part > 0) {
#pragma unroll
            for (int t = 0; t < TOKENS / 8; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[(((part - 1) * ROW_TILES + row_tile) * (TOKENS / 2) + 4 * t + i) * WARP + lane] = d[t][i];
        }
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int other = 0; other < P::COL_PARTS - 1; other++)
#pragma unroll
            for (int t = 0; t < TOKENS / 8; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    d[t][i] += sums[((other * ROW_TILES + row_tile) * (TOKENS / 2) + 4 * t + i) * WARP + lane];
    }
#pragma unroll
    for (int t = 0; t < TOKENS / 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 token = 8 * t + lane % 4 * 2 + i % 2;
            u32 r = first_row + 16 * row_tile + lane / 4 + i / 2 * 8;
            if (token < work.count && r < m.rows) {
                u32 y = work.first + token;
                float scale = a.scale[a.sources ? a.sources[y] : y];
                float bias = a.bias[which] ? a.bias[which][(u64)work.expert * m.rows + r] : 0;
                a.out[which][(u64)y * a.width[which] + r] = fmaf(d[t][i], scale, bias);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 7) gemm_8(const GemmArgs a) { gemm<8, false, 2>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_32(const GemmArgs a) { gemm<32, false, 1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_64(const GemmArgs a) { gemm<64, false, 4>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_8(const GemmArgs a) { gemm<8, true, 1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_32(const GemmArgs a) { gemm<32, true, 2>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_split_64(const GemmArgs a) { gemm<64, true, 4>(a); }
