// Routers: which experts a token goes to, and the batch sorted by expert.

#include "matrix.cuh"

#define MOST_CHOSEN 64

struct RouteArgs {
    const float* logits;     // [rows, experts]
    const float* correction; // [experts], or none
    u32* experts;            // [rows, top_k] the best first
    float* weights;          // [rows, top_k]
    u32* told;               // [rows, 1 + 2 * top_k] the same once more, in the computer's memory, or none
    u32 count, top_k;
    u32 sigmoid;    // whether scores are sigmoids and not softmax
    u32 groups;     // 0 if all are chosen from
    u32 used;       // groups that are chosen
    u32 best_two;   // whether a group is worth its two best
    u32 normalise;
    float scale;
    u32 turn; // what stands before a row that was told, when all of it is there
};

// The place of the largest of `count` numbers, ties to the lower one; a whole warp asks. NaN counts as the smallest.
__device__ inline u32 largest(const float* x, u32 count) {
    u32 lane = threadIdx.x;
    float best = -INFINITE;
    u32 place = 0xffffffffu;
    for (u32 i = lane; i < count; i += WARP)
        if (x[i] > best || (place == 0xffffffffu && x[i] >= best)) best = x[i], place = i;
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, best, step);
        u32 there = __shfl_xor_sync(ALL_LANES, place, step);
        if (other > best || (other == best && there < place)) best = other, place = there;
    }
    return place;
}

// The choice for a row, by the first warp of a block. Shared memory: the scores, what they are chosen by, and what groups
// are worth.
__device__ inline void choose(const RouteArgs& a, u64 row, float* shared) {
    float* score = shared;
    float* value = shared + a.count;
    float* worth = shared + 2 * a.count;
    u32 lane = threadIdx.x;
    const float* logits = a.logits + row * a.count;

    if (a.sigmoid) {
        for (u32 i = lane; i < a.count; i += WARP) score[i] = sigmoid(logits[i]);
    } else {
        float max = -INFINITE, sum = 0;
        for (u32 i = lane; i < a.count; i += WARP) max = fmaxf(max, logits[i]);
        max = warp_max(max);
        for (u32 i = lane; i < a.count; i += WARP) sum += score[i] = expf(logits[i] - max);
        sum = warp_sum(sum);
        for (u32 i = lane; i < a.count; i += WARP) score[i] /= sum;
    }
    for (u32 i = lane; i < a.count; i += WARP) {
        float v = score[i] + (a.correction ? a.correction[i] : 0);
        value[i] = v == v ? v : -INFINITE;
    }
    __syncwarp();

    if (a.groups) {
        u32 size = a.count / a.groups;
        for (u32 group = lane; group < a.groups; group += WARP) {
            float best = -INFINITE, second = -INFINITE;
            for (u32 i = group * size; i < (group + 1) * size; i++) {
                float v = value[i];
                if (v > best) second = best, best = v;
                else if (v > second) second = v;
            }
            worth[group] = a.best_two && size > 1 ? best + second : best;
        }
        __syncwarp();
        // Chosen groups are worth nothing more; the others are ruled out after all have been chosen.
        u32* chosen = (u32*)(worth + a.groups);
        for (u32 group = lane; group < a.groups; group += WARP) chosen[group] = 0;
        __syncwarp();
        for (u32 k = 0; k < a.used; k++) {
            u32 group = largest(worth, a.groups);
            if (lane == 0 && group < a.groups) chosen[group] = 1, worth[group] = __int_as_float(0x7fc00000);
            __syncwarp();
        }
        for (u32 i = lane; i < a.count; i += WARP)
            if (!chosen[i / size]) value[i] = -INFINITE;
        __syncwarp();
    }

    u32* experts = a.experts + row * a.top_k;
    float* weights = a.weights + row * a.top_k;
    float sum = 0;
    for (u32 k = 0; k < a.top_k; k++) {
        u32 expert = largest(value, a.count);
        // Only where nothing is left that could be compared.
        if (expert >= a.count) expert = k;
        float weight = score[expert];
        sum += weight;
        if (lane == 0) {
            experts[k] = expert;
            weights[k] = weight;
            value[expert] = __int_as_float(0x7fc00000);
        }
        __syncwarp();
    }
    float factor = a.normalise ? 1 / sum : 1;
    for (u32 k = lane; k < a.top_k; k += WARP) weights[k] = weights[k] * factor * a.scale;
    if (!a.told) return;
    u32* told = a.told + row * (1 + 2 * a.top_k);
    for (u32 k = lane; k < a.top_k; k += WARP) {
        told[1 + k] = experts[k];
        ((float*)told)[1 + a.top_k + k] = weights[k];
    }
    __threadfence_system();
    __syncwarp();
    if (lane == 0) *(volatile u32*)told = a.turn;
}

extern "C" __global__ void route(const RouteArgs a) {
    await_previous();
    extern __shared__ float shared[];
    choose(a, blockIdx.x, shared);
}

#define ROUTER_THREADS 256
// Fours of columns that a thread has at most.
#define MOST_FOURS 8

struct RouterArgs {
    RouteArgs route;
    const u8* w; // [experts, cols] floats
    u32 kind, cols;
    const float* x; // [rows, cols]
    PriorNorm norm;
    float* logits; // [rows, experts]
    u32* arrived;  // [rows] counters
};

__device__ inline float4 four_at(u32 kind, const u8* w, u64 i) {
    if (kind == F32) return ((const float4*)w)[i];
    uint2 two = ((const uint2*)w)[i];
    u16 a = two.x & 0xffff, b = two.x >> 16, c = two.y & 0xffff, d = two.y >> 16;
    if (kind == F16) return float4{half_to_float(a), half_to_float(b), half_to_float(c), half_to_float(d)};
    return float4{bf16_to_float(a), bf16_to_float(b), bf16_to_float(c), bf16_to_float(d)};
}

// Norms a row, multiplies it with a router and chooses: a block for each expert of each row, and the last one chooses.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) norm_and_route(const RouterArgs a) {
    extern __shared__ float shared[];
    u32 expert = blockIdx.x, fours = a.cols / 4;
    u64 row = blockIdx.y, first = row * fours;
    const float4* x = (const float4*)a.x + first;
    const float4* added = (const float4*)a.norm.added + first;
    const float4* norm = (const float4*)a.norm.w;
    // The weights are on their way before the activations are there.
    float4 w[MOST_FOURS];
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) {
        u32 i = threadIdx.x + j * ROUTER_THREADS;
        if (i >= fours) break;
        float4 n = norm[i];
        w[j] = four_at(a.kind, a.w, (u64)expert * fours + i);
        w[j].x *= n.x, w[j].y *= n.y, w[j].z *= n.z, w[j].w *= n.w;
    }
    await_previous();
    auto value = [&](u32 i) {
        float4 v = x[i];
        if (!a.norm.added) return v;
        float4 y = added[i];
        return float4{v.x + y.x, v.y + y.y, v.z + y.z, v.w + y.w};
    };
    float squares = 0, product = 0;
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) {
        u32 i = threadIdx.x + j * ROUTER_THREADS;
        if (i >= fours) break;
        float4 v = value(i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        product += v.x * w[j].x + v.y * w[j].y + v.z * w[j].z + v.w * w[j].w;
    }
    squares = block_sum(squares);
    product = block_sum(product);
    float factor = 1 / sqrtf(squares / a.cols + a.norm.eps);
    if (threadIdx.x == 0) a.logits[row * a.route.count + expert] = product * factor;
    // The first one keeps what the row was normed from and to.
    if (expert == 0) {
        for (u32 i = threadIdx.x; i < fours; i += ROUTER_THREADS) {
            float4 v = value(i), n = norm[i];
            if (a.norm.added) ((float4*)a.norm.sum)[first + i] = v;
            v.x *= factor * n.x, v.y *= factor * n.y, v.z *= factor * n.z, v.w *= factor * n.w;
            ((float4*)a.norm.normed)[first + i] = v;
        }
    }
    if (last_of(a.arrived + row, gridDim.x) && threadIdx.x < WARP) choose(a.route, row, shared);
}

struct Tile {
    u32 expert, first, count;
};

struct SortArgs {
    const u32* experts; // of each pair
    u32 pairs, top_k, count;
    u32* tokens; // [pairs] the token of each place
    u32* places; // [pairs] the place of each pair
    u32* owners; // [pairs] the expert of each place
    Tile* tiles;
    u32* tile_count;
    u32 tile; // places of a tile
};

// Sorts pairs into buckets by expert, and cuts those into tiles. One block of 1024 threads; shared memory: where the
// experts' buckets start, and how far they are filled.
extern "C" __global__ void sort(const SortArgs a) {
    await_previous();
    extern __shared__ u32 counts[];
    u32* starts = counts + a.count;
    for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < a.pairs; i += blockDim.x) atomicAdd(counts + a.experts[i], 1);
    __syncthreads();
    if (threadIdx.x < WARP) {
        u32 lane = threadIdx.x, place = 0, tiles = 0;
        for (u32 first = 0; first < a.count; first += WARP) {
            u32 i = first + lane;
            u32 mine = i < a.count ? counts[i] : 0, my_tiles = (mine + a.tile - 1) / a.tile;
            u32 sum = mine, tile_sum = my_tiles;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                u32 s = __shfl_up_sync(ALL_LANES, sum, step), t = __shfl_up_sync(ALL_LANES, tile_sum, step);
                if (lane >= step) sum += s, tile_sum += t;
            }
            u32 start = place + sum - mine, tile = tiles + tile_sum - my_tiles;
            if (i < a.count) {
                starts[i] = start;
                for (u32 t = 0; t < my_tiles; t++)
                    a.tiles[tile + t] = Tile{i, start + t * a.tile, min(a.tile, mine - t * a.tile)};
            }
            place += __shfl_sync(ALL_LANES, sum, WARP - 1);
            tiles += __shfl_sync(ALL_LANES, tile_sum, WARP - 1);
        }
        if (lane == 0) *a.tile_count = tiles;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < a.pairs; i += blockDim.x) {
        u32 place = atomicAdd(starts + a.experts[i], 1);
        a.tokens[place] = i / a.top_k;
        a.places[i] = place;
        a.owners[place] = a.experts[i];
    }
}

struct CombineArgs {
    const float* experts; // [places, width]
    const float* weights; // [rows, top_k]
    const u32* places;    // [rows, top_k], or none where a pair's place is its number
    float* out;           // [rows, width]
    u32 width, top_k;
};

// out[t] = the sum of weight * output, in rank order
extern "C" __global__ void combine(const CombineArgs a) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 row = blockIdx.y;
    if (i >= a.width) return;
    float sum = 0;
    for (u32 k = 0; k < a.top_k; k++) {
        u64 pair = row * a.top_k + k;
        u64 place = a.places ? a.places[pair] : pair;
        sum = fmaf(a.weights[pair], a.experts[place * a.width + i], sum);
    }
    a.out[row * a.width + i] = sum;
}
