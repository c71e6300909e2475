// Experts come to the device as they lie in their file. Here their bytes are put where products look for them.

#include "matrix.cuh"

// One plane of a matrix: rows of units, which are so many bytes apart where they come from and lie together where they go.
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
    const Plane* planes; // one for each y of the grid
    const Arrival* arrivals;
    u64* table; // where all experts are
    u32 count;  // of arrivals
};

// Copies as many bytes at a time as the type has, which divides the unit and everything that is added to `from`.
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
    const u64* from; // in the computer's memory
    u64* to;
    u32 count;
};

// Takes a little from the computer's memory. A copy would have to wait until the experts that are on their way have come. Nobody reads
// what it writes to but those after it, nor does the kernel before it, so it need not wait to begin; but it does not end before
// that one, because who waits for this one counts on both.
extern "C" __global__ void fetch(const FetchArgs a) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) a.to[i] = ((const volatile u64*)a.from)[i];
    await_previous();
}

struct PutArgs {
    const float* from; // one row after the other
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
