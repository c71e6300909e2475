// Products of weight matrices with many rows of activations, on the tensor cores.

#include "matrix.cuh"

#define TILE_ROWS 64
#define TILE_COLS 64
#define THREADS 128
// Halves of a row in shared memory: eight more than a tile has, so that eight rows lie in different banks.
#define STRIDE (TILE_COLS + 8)
#define MOST_PRODUCTS 4

struct HalveArgs {
    const float* x;
    u16* out;     // [rows, width]
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
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) out[i] = float_to_half(x[i] * inverse);
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
    const float* scale; // of the rows of x
    u32 rows;           // of the output, where there are no tiles
    const Tile* tiles;  // of experts
    const u32* tile_count;
    const u32* sources; // [rows of the output] which row of x each reads, if not its own
};

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void load_four(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ inline void load_two(u32 (&r)[2], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(p)));
}

__device__ inline void multiply_add(float (&d)[4], const u32 (&a)[4], const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A group of weights as halves to shared memory.
template <u32 KIND> __device__ inline void unpack_to(const Mat& m, const Row& r, u32 index, u16* to) {
    Group g;
    Unpack<KIND>::group(m, r, index, g);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 words;
        words.x = two_halves(weight(g, 8 * i), weight(g, 8 * i + 1));
        words.y = two_halves(weight(g, 8 * i + 2), weight(g, 8 * i + 3));
        words.z = two_halves(weight(g, 8 * i + 4), weight(g, 8 * i + 5));
        words.w = two_halves(weight(g, 8 * i + 6), weight(g, 8 * i + 7));
        ((uint4*)to)[i] = words;
    }
}

// out[y][r] = w[r] . x[y] for TILE_ROWS rows of a matrix and TOKENS rows of x.
template <int TOKENS> __device__ inline void gemm(const GemmArgs& a) {
    __shared__ __align__(16) u16 weights[TILE_ROWS * STRIDE];
    __shared__ __align__(16) u16 xs[TOKENS * STRIDE];

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
#define BODY(KIND) unpack_to<KIND>(m, row, index, my_weights)
            WITH_KIND(m.kind, BODY)
#undef BODY
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) ((uint4*)my_weights)[i] = uint4{0, 0, 0, 0};
        }
        // Eight halves at a time; the last columns of rows that are no multiple of eight are taken one by one.
#pragma unroll
        for (int chunk = threadIdx.x; chunk < TOKENS * 8; chunk += THREADS) {
            u32 token = chunk / 8, col = k + chunk % 8 * 8;
            uint4 words = {0, 0, 0, 0};
            if (token < count && col < m.cols) {
                u32 source = a.sources ? a.sources[first + token] : first + token;
                const u16* x = a.x + (u64)source * m.cols + col;
                if (m.cols % 8 == 0) {
                    words = *(const uint4*)x;
                } else {
                    u16* halves = (u16*)&words;
                    for (int i = 0; i < 8 && col + i < m.cols; i++) halves[i] = x[i];
                }
            }
            *(uint4*)(xs + token * STRIDE + chunk % 8 * 8) = words;
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < TILE_COLS; step += 16) {
            u32 w[4];
            load_four(w, weights + (16 * warp + lane % 16) * STRIDE + step + lane / 16 * 8);
#pragma unroll
            for (int t = 0; t + 16 <= TOKENS; t += 16) {
                u32 x[4];
                load_four(x, xs + (t + lane % 8 + lane / 16 * 8) * STRIDE + step + lane / 8 % 2 * 8);
                multiply_add(d[t / 8], w, x);
                multiply_add(d[t / 8 + 1], w, x + 2);
            }
            if (TOKENS % 16) {
                u32 x[2];
                load_two(x, xs + (TOKENS - 8 + lane % 8) * STRIDE + step + lane / 8 % 2 * 8);
                multiply_add(d[TOKENS / 8 - 1], w, x);
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

extern "C" __global__ void __launch_bounds__(THREADS) gemm_8(const GemmArgs a) { gemm<8>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_32(const GemmArgs a) { gemm<32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_64(const GemmArgs a) { gemm<64>(a); }
