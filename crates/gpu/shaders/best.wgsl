
// Finds candidates for the likeliest tokens of rows of logits: each row's logits are counted in bins by value, and those
// in the bins that can contain the result are gathered.

struct Args { width: u32, k: u32, rows: u32 }
var<immediate> args: Args;

// Logits are compared as integers, whatever the GPU makes of numbers that are not finite.
@group(0) @binding(#) var<storage, read> logits: array<u32>;                // [rows, width]
@group(0) @binding(#) var<storage, read_write> bins: array<atomic<u32>>;    // [rows, BINS]
@group(0) @binding(#) var<storage, read_write> found: array<atomic<u32>>;   // [rows] how many are gathered
@group(0) @binding(#) var<storage, read_write> gathered: array<vec2<u32>>;  // [rows, MOST] tokens and logits

const THREADS: u32 = 256u;
const BIN_BITS: u32 = 12u;
const BINS: u32 = 4096u;
// Logits of a workgroup.
const SHARE: u32 = 4096u;

// The constants must be those of best.rs.
const MOST: u32 = 4096u;

// A larger number for a likelier token. NaN counts as minus infinity, infinity as the largest finite number, and minus
// zero as zero.
fn bin_of(logit: u32) -> u32 {
    var bits = logit;
    if (bits & 0x7fffffffu) > 0x7f800000u { bits = 0xff800000u; }
    if bits == 0x7f800000u { bits = 0x7f7fffffu; }
    if bits == 0x80000000u { bits = 0u; }
    return select(bits | 0x80000000u, ~bits, bits >> 31u == 1u) >> (32u - BIN_BITS);
}

@compute @workgroup_size(256)
fn clear(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = THREADS * group.x + thread;
    if i < BINS { atomicStore(&bins[group.y * BINS + i], 0u); }
    if i == 0u { atomicStore(&found[group.y], 0u); }
}

var<workgroup> counts: array<atomic<u32>, BINS>;

@compute @workgroup_size(256)
fn count(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < BINS; i += THREADS) { atomicStore(&counts[i], 0u); }
    workgroupBarrier();
    for (var i = SHARE * group.x + thread; i < min(SHARE * (group.x + 1u), args.width); i += THREADS) {
        atomicAdd(&counts[bin_of(logits[group.y * args.width + i])], 1u);
    }
    workgroupBarrier();
    for (var i = thread; i < BINS; i += THREADS) {
        let mine = atomicLoad(&counts[i]);
        if mine > 0u { atomicAdd(&bins[group.y * BINS + i], mine); }
    }
}

var<workgroup> totals: array<u32, THREADS>;
// The last bin that can contain the result.
var<workgroup> last: u32;

// The number in the n-th bin of a row, from the largest logits on.
fn in_bin(row: u32, n: u32) -> u32 { return atomicLoad(&bins[row * BINS + BINS - 1u - n]); }

@compute @workgroup_size(256)
fn gather(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    // Every thread has the same number of bins, the first thread those of the largest logits.
    let each = BINS / THREADS;
    let row = group.y;
    var mine = 0u;
    for (var i = 0u; i < each; i++) { mine += in_bin(row, each * thread + i); }
    totals[thread] = mine;
    workgroupBarrier();
    var sum = 0u;
    for (var i = 0u; i < thread; i++) { sum += totals[i]; }
    if sum < args.k && args.k <= sum + mine {
        var n = each * thread;
        sum += in_bin(row, n);
        while sum < args.k {
            n++;
            sum += in_bin(row, n);
        }
        last = BINS - 1u - n;
    }
    workgroupBarrier();
    for (var i = SHARE * group.x + thread; i < min(SHARE * (group.x + 1u), args.width); i += THREADS) {
        let logit = logits[row * args.width + i];
        if bin_of(logit) >= last {
            let place = atomicAdd(&found[row], 1u);
            if place < MOST { gathered[row * MOST + place] = vec2<u32>(i, logit); }
        }
    }
}
