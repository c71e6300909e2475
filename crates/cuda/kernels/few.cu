// Products of weight matrices with a few rows of activations.

#include "matrix.cuh"
#include "tensor.cuh"
#include "few.cuh"

struct FewArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], or null
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];
    const float* x;     // [rows, cols]
    u32 rows;           // of the output, if there are no tiles
    u32 each;           // tiles of 16 rows that a warp computes in sequence
    const Tile* tiles;  // of experts
    const u32* tile_count;
    const u32* sources; // [rows of the output] the row of x that each reads, or null for its own
    Activation activation; // if gated
    Mat next;              // the matrix of the same tiles' next product, and how many tiles prefetch it
    u32 ahead;
};

// The rows of activations of a block, and their expert.
struct Work {
    u32 expert, first, count;
};

__device__ inline u32 source(const FewArgs& a, u32 y) { return a.sources ? a.sources[y] : y; }

// out[y][r] = w[r] . x[y] or, if gated, out[y][r] = activation(w[0][r] . x[y], w[1][r] . x[y]). TILES is the number of
// tokens divided by eight. Every warp has its own rows.
template <int TILES, bool GATED> __device__ inline void few(const FewArgs& a) {
    extern __shared__ uint4 staged[];
    __shared__ float powers[8 * TILES];
    // Loads weights before the activations are ready. Without experts, their addresses are known by then.
    if (a.tiles) await_previous();
    Which which = which_of(a.blocks);
    const Mat& m = a.w[which.number];
    Work work = {0, blockIdx.y * 8 * TILES, 8 * TILES};
    u64 slot = 0;
    if (a.tiles) {
        // Loads both at once. There is a tile for every block in memory.
        Tile tile = a.tiles[blockIdx.y];
        if (blockIdx.y >= *a.tile_count) return;
        slot = slot_of(m, tile.expert);
        if (absent(m, slot)) return;
        work = Work{tile.expert, tile.first, tile.count};
    } else {
        work.count = min(work.count, a.rows - work.first);
    }
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 strips = (m.cols + STRIP - 1) / STRIP, stride = EIGHTS * strips + 1, sums_stride = 4 * (strips | 1);
    u16* sums = (u16*)(staged + 8 * TILES * stride);
    Activations x = {staged + lane / 4 * stride, (const uint2*)sums + lane / 4 * sums_stride, stride, sums_stride};

    u32 step = GATED ? 8 : 16;
    u32 first_row = ((blockIdx.x - which.start) * WARPS + warp) * a.each * step;
    Rows rows = {&m, GATED ? &a.w[1] : &m, slot, first_row, step, 0, strips};

    // Columns of missing tokens keep arbitrary values, because their results are not used.
    auto prepare = [&]() {
        if (!a.tiles) await_previous();
        u32 row = EIGHTS * strips, count = work.count * row;
        auto at = [&](u32 token, u32 index) {
            const float* from = a.x + (u64)source(a, work.first + token) * m.cols;
            return Eight{from, index, staged + token * stride, sums + 4 * token * sums_stride};
        };
        auto mine = [&](u32 i) { return at((threadIdx.x + i * THREADS) / row, (threadIdx.x + i * THREADS) % row); };
        u32 each = threadIdx.x < count ? (count - threadIdx.x + THREADS - 1) / THREADS : 0;
        float largest = stage_all<4>(each, m.cols, mine);
        if (threadIdx.x < 8 * TILES) powers[threadIdx.x] = 1;
        if (!__syncthreads_or(largest > MOST_HALF)) return;
        for (u32 token = warp; token < work.count; token += WARPS) {
            float power = stage_large(at(token, 0), m.cols, 0, row);
            if (lane == 0) powers[token] = power;
        }
        __syncthreads();
    };
    auto done = [&](u32 turn, float (&sum)[TILES][4]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < (GATED ? 2 : 4); i++) {
                u32 token = 8 * tile + lane % 4 * 2 + i % 2;
                u32 r = first_row + turn * step + lane / 4 + i / 2 * 8;
                if (token >= work.count || r >= m.rows) continue;
                u64 y = work.first + token, at = (u64)work.expert * m.rows + r;
                const float* bias = a.bias[which.number];
                float value = fmaf(sum[tile][i], powers[token], bias ? bias[at] : 0);
                if (GATED) {
                    float up = fmaf(sum[tile][i + 2], powers[token], a.bias[1] ? a.bias[1][at] : 0);
                    value = activate(value, up, a.activation);
                }
                a.out[which.number][y * a.width[which.number] + r] = value;
            }
        }
    };
#define BODY(KIND)                                                                                                     \
    if constexpr (KIND != F32 && KIND != F16 && KIND != BF16) pass<Share<KIND>, TILES, GATED>(rows, a.each, prepare, x, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
    if (GATED && a.ahead && threadIdx.x == 0) {
        // While the last blocks end, memory would be idle. So they prefetch what the next kernel reads first.
        u32 count = *a.tile_count, last = min(count, a.ahead), share = (a.next.rows + gridDim.x - 1) / gridDim.x;
        u32 tile = blockIdx.y + last - count;
        if (blockIdx.y + last >= count) fetch_rows(a.next, slot_of(a.next, a.tiles[tile].expert), blockIdx.x * share, share);
    }
}

// out[y][r] = w[r] . x[y] if there are not enough rows for all warps: the warps of a block share the columns. Each
// loads its part of the activations to shared memory and needs no other warp until the sums are combined.
template <int TILES> __device__ inline void few_shared(const FewArgs& a) {
    const int TOKENS = 8 * TILES, NUMBERS = 4 * TILES;
    extern __shared__ uint4 staged[];
    Which which = which_of(a.blocks);
    const Mat& m = a.w[which.number];
    u32 first_token = blockIdx.y * TOKENS, tokens = min(TOKENS, a.rows - first_token);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 strips = (m.cols + STRIP - 1) / STRIP, stride = EIGHTS * strips + 1, sums_stride = 4 * (strips | 1);
    u16* sums = (u16*)(staged + TOKENS * stride);
    float* parts = (float*)(sums + 4 * TOKENS * sums_stride); // [turns, WARPS, NUMBERS, WARP]
    Activations x = {staged + lane / 4 * stride, (const uint2*)sums + lane / 4 * sums_stride, stride, sums_stride};

    u32 share = (strips + WARPS - 1) / WARPS, first_strip = min(warp * share, strips);
    u32 first_row = (blockIdx.x - which.start) * a.each * 16;
    Rows rows = {&m, &m, 0, first_row, 16, first_strip, min(share, strips - first_strip)};
    u32 turns = min(a.each, (m.rows - first_row + 15) / 16);

    // The scale of the two tokens of each tile whose sums a lane has.
    float power[TILES][2];
    auto prepare = [&]() {
        await_previous();
        u32 first = EIGHTS * first_strip, end = first + EIGHTS * rows.strips;
        auto at = [&](u32 token, u32 index) {
            const float* from = a.x + (u64)(first_token + token) * m.cols;
            return Eight{from, index, staged + token * stride, sums + 4 * token * sums_stride};
        };
        float largest = 0, mine = 1;
        for (u32 index = first + lane; index < end; index += WARP)
            largest = fmaxf(largest, stage_all<8>(tokens, m.cols, [&](u32 token) { return at(token, index); }));
        if (__any_sync(ALL_LANES, largest > MOST_HALF)) {
            for (u32 token = 0; token < tokens; token++) {
                float large = stage_large(at(token, 0), m.cols, first, end);
                if (lane == token) mine = large;
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            power[i / 2][i % 2] = __shfl_sync(ALL_LANES, mine, 8 * (i / 2) + lane % 4 * 2 + i % 2);
        __syncwarp();
    };
    auto done = [&](u32 turn, float (&sum)[TILES][4]) {
#pragma unroll
        for (int i = 0; i < NUMBERS; i++)
            parts[((turn * WARPS + warp) * NUMBERS + i) * WARP + lane] = sum[i / 4][i % 4] * power[i / 4][i % 2];
    };
#define BODY(KIND)                                                                                                     \
    if constexpr (KIND != F32 && KIND != F16 && KIND != BF16) pass<Share<KIND>, TILES, false>(rows, turns, prepare, x, done)
    WITH_KIND(m.kind, BODY)
#undef BODY
    __syncthreads();
    // Adds the sums of the warps' columns in order. Each warp adds one of a turn's numbers at a time.
    for (u32 number = warp; number < turns * NUMBERS; number += WARPS) {
        u32 turn = number / NUMBERS, i = number % NUMBERS;
        const float* from = parts + (turn * WARPS * NUMBERS + i) * WARP + lane;
        float total = 0;
#pragma unroll
        for (int part = 0; part < WARPS; part++) total += from[part * NUMBERS * WARP];
        u32 token = i / 4 * 8 + lane % 4 * 2 + i % 2, r = first_row + turn * 16 + lane / 4 + i / 2 % 2 * 8;
        if (token >= tokens || r >= m.rows) continue;
        const float* bias = a.bias[which.number];
        a.out[which.number][(u64)(first_token + token) * a.width[which.number] + r] = total + (bias ? bias[r] : 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) few_8(const FewArgs a) { few<1, false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) few_16(const FewArgs a) { few<2, false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) few_gate_up(const FewArgs a) { few<1, true>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) few_shared_8(const FewArgs a) { few_shared<1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) few_shared_16(const FewArgs a) { few_shared<2>(a); }
