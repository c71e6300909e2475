// Rearranges uploaded experts: from the layout of their file to that of the kernels.

#include "matrix.cuh"

// One plane of a matrix: rows of units, which are `unit_step` bytes apart in the source and contiguous in the
// destination.
struct Plane {
    const u8* from;
    u8* to;
    u64 row_step;
    u32 rows, units, unit, unit_step;
};

struct Arrival {
    u64 index; // in the table
    u64 slot;
};

struct ArrangeArgs {
    const Plane* planes; // one per y of the grid
    const Arrival* arrivals;
    u64* table; // the addresses of all experts
    u32 count;  // of arrivals
};

// Copies with the largest word whose size divides the unit and all offsets of `from`.
template <class Bytes> __device__ inline void copy_plane(const Plane& p) {
    u32 stride = p.unit * p.units, count = p.rows * (stride / (u32)sizeof(Bytes));
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        u32 at = i * (u32)sizeof(Bytes), row = at / stride, unit = at % stride / p.unit, rest = at % stride % p.unit;
        const u8* from = p.from + row * p.row_step + (u64)unit * p.unit_step + rest;
        *(Bytes*)(p.to + at) = *(const Bytes*)from;
    }
}

extern "C" __global__ void arrange(const ArrangeArgs a) {
    await_previous();
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) a.table[a.arrivals[i].index] = a.arrivals[i].slot;
    Plane p = a.planes[blockIdx.y];
    u64 odd = (u64)p.from | p.row_step | p.unit | (p.units > 1 ? p.unit_step : 0);
    if (odd % 16 == 0) copy_plane<uint4>(p);
    else if (odd % 4 == 0) copy_plane<u32>(p);
    else if (odd % 2 == 0) copy_plane<u16>(p);
    else copy_plane<u8>(p);
}

struct FetchArgs {
    const u64* from; // in RAM
    u64* to;
    u32 count;
};

// Fetches a little data from RAM. A copy would have to wait until uploads of experts have ended. Only later kernels
// read what it writes, and no earlier one does, so it may begin at once. But it ends only after the kernel before it,
// because the kernel after it relies on both.
extern "C" __global__ void fetch(const FetchArgs a) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.to[i] = ((const volatile u64*)a.from)[i];
    await_previous();
}

struct PutArgs {
    const float* from; // contiguous rows
    const u32* rows;
    float* to;
    u32 width;
};

// to[rows[y]] = from[y]
extern "C" __global__ void put_rows(const PutArgs a) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.width) a.to[(u64)a.rows[blockIdx.y] * a.width + i] = a.from[(u64)blockIdx.y * a.width + i];
}
