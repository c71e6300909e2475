
// Sums by way of shared memory. The order of additions is that of sums_subgroups.wgsl: neighbours first.

var<workgroup> sums: array<f32, 256>;

// The sum over each 32 consecutive threads. All threads of the workgroup call it.
fn sum_32(thread: u32, value: f32) -> f32 { return sum_threads(thread, value, 32u); }

// The sum over `count` consecutive threads, a power of two.
fn sum_threads(thread: u32, value: f32, count: u32) -> f32 {
    var sum = value;
    for (var step = 1u; step < count; step *= 2u) {
        sums[thread] = sum;
        workgroupBarrier();
        sum += sums[thread ^ step];
        workgroupBarrier();
    }
    return sum;
}

// The largest of the values of `count` consecutive threads, a power of two.
fn max_threads(thread: u32, value: f32, count: u32) -> f32 {
    var largest = value;
    for (var step = 1u; step < count; step *= 2u) {
        sums[thread] = largest;
        workgroupBarrier();
        largest = max(largest, sums[thread ^ step]);
        workgroupBarrier();
    }
    return largest;
}
