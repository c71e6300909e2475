// Routers: choosing the experts of each token, and sorting the batch by expert.

#include "matrix.cuh"

#define MOST_CHOSEN 64

// How logits become scores. The order is that of `choose` in choice.rs.
enum Scores { SOFTMAX, SIGMOIDS, SPARSE_MIXER };

struct RouteArgs {
    const float* logits;     // [rows, experts]
    const float* correction; // [experts], or null
    const float* factors;    // [experts] of the final weights, or null
    u32* experts;            // [rows, top_k] the best first
    float* weights;          // [rows, top_k]
    u32* told;               // [rows, 1 + 2 * top_k] the same again, in RAM, or null
    u32 count, top_k;
    u32 scores;
    float tolerance; // of a sparse mixer
    u32 groups;     // 0 if experts are not in groups
    u32 used;       // groups that are chosen
    u32 best_two;   // whether a group is valued by its two best experts instead of one
    u32 normalise;
    float epsilon; // added to the sum that weights are divided by
    float scale;
    u32 turn; // written before a reported row when the row is complete
};

// Maps a float to an integer that is larger for a larger float, and never 0. NaN counts as minus infinity, minus zero
// as zero.
__device__ inline u32 order(float x) {
    u32 bits = __float_as_uint(x == x ? x + 0.0f : -INFINITE);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Picks the `k` largest of the numbers that are not 0, and sets them to 0; of equals, the lower index wins. One warp
// does this, and each lane tracks the largest of its own numbers.
template <class Take> __device__ inline void pick_largest(u32* numbers, u32 count, u32 k, Take take) {
    u32 lane = threadIdx.x % WARP, best, place;
    auto look = [&]() {
        best = 0, place = count - 1;
        for (u32 i = lane; i < count; i += WARP)
            if (numbers[i] > best) best = numbers[i], place = i;
    };
    look();
    for (u32 n = 0; n < k; n++) {
        u32 largest = __reduce_max_sync(ALL_LANES, best);
        u32 winner = __reduce_min_sync(ALL_LANES, best == largest ? place : count - 1);
        take(n, winner);
        if (winner % WARP != lane) continue;
        numbers[winner] = 0;
        look();
    }
}

// The weight of an expert that a sparse mixer chooses: its softmax among the experts that are about as good and were not
// chosen before it, which are the numbers that are not 0. All lanes get it.
__device__ inline float mixed(const RouteArgs& a, const float* logits, const u32* numbers, u32 expert) {
    float best = logits[expert], sum = 0;
    for (u32 i = threadIdx.x % WARP; i < a.count; i += WARP) {
        float logit = logits[i];
        // Of two zeros, the distance is not a number, so the comparison must not be turned round.
        bool is_worse = (best - logit) / fmaxf(fabsf(logit), best) > a.tolerance;
        if (numbers[i] && !is_worse) sum += expf(logit - best);
    }
    return 1 / warp_sum(sum);
}

// One warp makes the choice for a row. Shared memory holds the scores, the values that they are chosen by, the values
// of groups and which are chosen, and the experts.
__device__ inline void choose(const RouteArgs& a, u64 row, float* shared) {
    float* score = shared;
    u32* numbers = (u32*)shared + a.count;
    u32* worth = numbers + a.count;
    u32* used = worth + a.groups;
    u32* chosen = used + a.groups;
    u32 lane = threadIdx.x % WARP;
    const float* logits = a.logits + row * a.count;

    // Until the warp synchronises, lanes read only what they wrote themselves.
    for (u32 i = lane; i < a.count; i += WARP) score[i] = logits[i];
    if (a.scores == SIGMOIDS) {
        for (u32 i = lane; i < a.count; i += WARP) score[i] = sigmoid(score[i]);
    } else if (a.scores == SOFTMAX) {
        float max = -INFINITE, sum = 0;
        for (u32 i = lane; i < a.count; i += WARP) max = fmaxf(max, score[i]);
        max = warp_max(max);
        for (u32 i = lane; i < a.count; i += WARP) sum += score[i] = expf(score[i] - max);
        sum = warp_sum(sum);
        for (u32 i = lane; i < a.count; i += WARP) score[i] /= sum;
    }
    auto value = [&](u32 i) {
        float v = score[i] + (a.correction ? a.correction[i] : 0);
        return v == v ? v : -INFINITE;
    };
    for (u32 i = lane; i < a.count; i += WARP) numbers[i] = order(value(i));
    __syncwarp();

    if (a.groups) {
        u32 size = a.count / a.groups;
        for (u32 group = lane; group < a.groups; group += WARP) {
            float best = -INFINITE, second = -INFINITE;
            for (u32 i = group * size; i < (group + 1) * size; i++) {
                float v = value(i);
                if (v > best) second = best, best = v;
                else if (v > second) second = v;
            }
            worth[group] = order(a.best_two && size > 1 ? best + second : best);
            used[group] = 0;
        }
        __syncwarp();
        pick_largest(worth, a.groups, a.used, [&](u32, u32 group) {
            if (lane == 0) used[group] = 1;
        });
        __syncwarp();
        for (u32 i = lane; i < a.count; i += WARP)
            if (!used[i / size]) numbers[i] = order(-INFINITE);
    }

    float sum = 0;
    pick_largest(numbers, a.count, a.top_k, [&](u32 k, u32 expert) {
        float weight = score[expert];
        if (a.scores == SPARSE_MIXER) {
            weight = mixed(a, score, numbers, expert);
            // Later choices do not need the logit.
            if (expert % WARP == lane) score[expert] = weight;
        }
        sum += weight;
        if (lane == 0) chosen[k] = expert;
    });
    __syncwarp();
    float divisor = a.normalise ? sum + a.epsilon : 1;
    u32* told = a.told ? a.told + row * (1 + 2 * a.top_k) : nullptr;
    for (u32 k = lane; k < a.top_k; k += WARP) {
        float weight = score[chosen[k]] / divisor * a.scale;
        if (a.factors) weight *= a.factors[chosen[k]];
        a.experts[row * a.top_k + k] = chosen[k];
        a.weights[row * a.top_k + k] = weight;
        if (told) told[1 + k] = chosen[k], ((float*)told)[1 + a.top_k + k] = weight;
    }
    if (!told) return;
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
#define ROUTER_WARPS (ROUTER_THREADS / WARP)
// The most groups of four columns per thread.
#define MOST_FOURS 4
// Experts per block if every warp has a row.
#define ROUTER_EXPERTS 4
// Groups of four columns in flight per lane there.
#define TOGETHER 4

struct RouterArgs {
    RouteArgs route;
    const u8* w; // [experts, cols] floats
    u32 kind, cols;
    const float* x; // [rows, cols]
    PriorNorm norm;
    float* logits; // [rows, experts]
    u32* arrived;  // counters
    u32 rows;
    u32 shared; // floats of shared memory that a choice needs
};

// Weights in their memory layout. There is no branch between loads, so that many are in flight.
template <u32 KIND> struct Four;
template <> struct Four<F32> {
    float4 four;
    __device__ inline float4 floats() const { return four; }
};
template <> struct Four<F16> {
    uint2 two;
    __device__ inline float4 floats() const {
        return float4{half_to_float(two.x & 0xffff), half_to_float(two.x >> 16), half_to_float(two.y & 0xffff),
                      half_to_float(two.y >> 16)};
    }
};
template <> struct Four<BF16> {
    uint2 two;
    __device__ inline float4 floats() const {
        return float4{bf16_to_float(two.x & 0xffff), bf16_to_float(two.x >> 16), bf16_to_float(two.y & 0xffff),
                      bf16_to_float(two.y >> 16)};
    }
};

// Four columns of a row and what is added to them.
struct Summands {
    float4 x, y;
    __device__ inline float4 sum() const { return float4{x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w}; }
};

// A row before its norm.
struct Before {
    const float4* x;
    const float4* added; // or null

    __device__ inline Before(const RouterArgs& a, u64 row) {
        x = (const float4*)a.x + row * (a.cols / 4);
        added = a.norm.added ? (const float4*)a.norm.added + row * (a.cols / 4) : 0;
    }
    // Zeros if `there` is false.
    __device__ inline Summands load(u32 i, bool there) const {
        Summands s = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        bool more = there && added;
        if (there) s.x = x[i];
        if (more) s.y = added[i];
        return s;
    }
    // Stores the norm's input and output, with `threads` threads.
    __device__ inline void keep(const RouterArgs& a, u64 row, float factor, u32 thread, u32 threads) const {
        u64 first = row * (a.cols / 4);
#pragma unroll 4
        for (u32 i = thread; i < a.cols / 4; i += threads) {
            float4 v = load(i, true).sum(), n = ((const float4*)a.norm.w)[i];
            if (added) ((float4*)a.norm.sum)[first + i] = v;
            v.x *= factor * n.x, v.y *= factor * n.y, v.z *= factor * n.z, v.w *= factor * n.w;
            ((float4*)a.norm.normed)[first + i] = v;
        }
    }
};

__device__ inline float4 times(float4 a, float4 b) { return float4{a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ inline float dot(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ inline float norm_factor(const RouterArgs& a, float squares) {
    return 1 / sqrtf(squares / a.cols + a.norm.eps);
}

// Two sums over a block. Every thread gets them.
__device__ inline float2 block_sums(float x, float y) {
    __shared__ float2 sums[ROUTER_WARPS];
    x = warp_sum(x), y = warp_sum(y);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = float2{x, y};
    __syncthreads();
    float2 total = {0, 0};
#pragma unroll
    for (int i = 0; i < ROUTER_WARPS; i++) total.x += sums[i].x, total.y += sums[i].y;
    return total;
}

// Calls `body` with the kind of the router's weights as a constant.
#define WITH_FLOATS(kind, body)                                                                                        \
    if (kind == F32) body<F32>(a, shared);                                                                             \
    else if (kind == F16) body<F16>(a, shared);                                                                        \
    else body<BF16>(a, shared);

// Norms a row, multiplies it with a router and chooses: one block per expert of a row, and the last block chooses.
template <u32 KIND> __device__ inline void route_row(const RouterArgs& a, float* shared) {
    u32 expert = blockIdx.x, fours = a.cols / 4;
    u64 row = blockIdx.y;
    const float4* norm = (const float4*)a.norm.w;
    const Four<KIND>* from = (const Four<KIND>*)a.w + (u64)expert * fours;
    // Loads the weights before the activations are ready.
    Four<KIND> w[MOST_FOURS];
    float4 n[MOST_FOURS];
    Summands s[MOST_FOURS];
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) {
        u32 i = threadIdx.x + j * ROUTER_THREADS;
        if (i < fours) w[j] = from[i], n[j] = norm[i];
    }
    float4 normed[MOST_FOURS];
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) normed[j] = times(w[j].floats(), n[j]);
    await_previous();
    Before before(a, row);
    float squares = 0, product = 0;
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) {
        u32 i = threadIdx.x + j * ROUTER_THREADS;
        s[j] = before.load(i, i < fours);
    }
#pragma unroll
    for (int j = 0; j < MOST_FOURS; j++) {
        if (threadIdx.x + j * ROUTER_THREADS >= fours) break;
        float4 v = s[j].sum();
        squares = dot(v, v, squares);
        product = dot(v, normed[j], product);
    }
    float2 sums = block_sums(squares, product);
    float factor = norm_factor(a, sums.x);
    if (threadIdx.x == 0) a.logits[row * a.route.count + expert] = sums.y * factor;
    if (last_of(a.arrived + row, gridDim.x) && threadIdx.x < WARP) choose(a.route, row, shared);
    // The first block stores the normed row while others continue.
    if (expert == 0) before.keep(a, row, factor, threadIdx.x, ROUTER_THREADS);
}

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 2) norm_and_route(const RouterArgs a) {
    extern __shared__ float shared[];
    WITH_FLOATS(a.kind, route_row)
}

// The same for many rows: each warp has a row, each block some experts. The last block with the same rows chooses.
template <u32 KIND> __device__ inline void route_rows(const RouterArgs& a, float* shared) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, fours = a.cols / 4;
    u32 first = blockIdx.x * ROUTER_EXPERTS;
    u64 row = blockIdx.y * ROUTER_WARPS + warp;
    bool active = row < a.rows;
    // Experts beyond the last repeat it.
    auto weights_of = [&](u32 e) { return (const Four<KIND>*)a.w + (u64)min(first + e, a.route.count - 1) * fours; };
    // Each warp prefetches a part of an expert's weights.
    const u32 SHARES = ROUTER_WARPS / ROUTER_EXPERTS;
    const u8* ahead = (const u8*)weights_of(warp / SHARES);
    for (u32 line = warp % SHARES * WARP + lane; line * 128 < fours * sizeof(Four<KIND>); line += SHARES * WARP)
        fetch_ahead(ahead + line * 128);
    const Four<KIND>* w[ROUTER_EXPERTS];
#pragma unroll
    for (int e = 0; e < ROUTER_EXPERTS; e++) w[e] = weights_of(e);
    await_previous();
    if (active) {
        Before before(a, row);
        float squares = 0, product[ROUTER_EXPERTS] = {};
        for (u32 from = lane; from < fours; from += TOGETHER * WARP) {
            Summands s[TOGETHER];
            float4 n[TOGETHER];
            Four<KIND> some[TOGETHER][ROUTER_EXPERTS];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                // Summands beyond the last are zero, so their products are, too.
                u32 i = from + j * WARP, there = min(i, fours - 1);
                s[j] = before.load(i, i < fours);
                n[j] = ((const float4*)a.norm.w)[there];
#pragma unroll
                for (int e = 0; e < ROUTER_EXPERTS; e++) some[j][e] = w[e][there];
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                float4 v = s[j].sum();
                squares = dot(v, v, squares);
                v = times(v, n[j]);
#pragma unroll
                for (int e = 0; e < ROUTER_EXPERTS; e++) product[e] = dot(v, some[j][e].floats(), product[e]);
            }
        }
        float factor = norm_factor(a, warp_sum(squares));
#pragma unroll
        for (int e = 0; e < ROUTER_EXPERTS; e++) {
            float sum = warp_sum(product[e]);
            if (lane == e && first + e < a.route.count) a.logits[row * a.route.count + first + e] = sum * factor;
        }
        if (blockIdx.x == 0) before.keep(a, row, factor, lane, WARP);
    }
    if (last_of(a.arrived + blockIdx.y, gridDim.x) && active) choose(a.route, row, shared + warp * a.shared);
}

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 1) norm_and_route_rows(const RouterArgs a) {
    extern __shared__ float shared[];
    WITH_FLOATS(a.kind, route_rows)
}

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

// Sorts pairs into buckets by expert, and cuts the buckets into tiles. One block of 1024 threads. Shared memory holds
// the start of each expert's bucket, and how full it is.
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
    const u32* places;    // [rows, top_k], or null if a pair's place is its index
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
