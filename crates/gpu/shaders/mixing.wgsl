
// Sorting the pairs of a batch by expert, and adding experts' outputs. EXPERTS is the number of a layer's experts.

struct Args {
    pairs: u32,
    top_k: u32,
    width: u32,  // of the output
    tile: u32,   // places of a tile
    tiles: u32,  // room for tiles
    sorted: u32, // whether a pair's place is in the list; otherwise it is the pair's number
    adjugate: u32, // whether there are adjugate experts, and their factor
    factor: f32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> pairs: array<u32>;        // the expert of each pair
@group(0) @binding(#) var<storage, read_write> tokens: array<u32>; // the token at each place
@group(0) @binding(#) var<storage, read_write> places: array<u32>; // the place of each pair
@group(0) @binding(#) var<storage, read_write> tiles: array<vec4<u32>>;
@group(0) @binding(#) var<storage, read> weights: array<f32>;      // of each pair
@group(0) @binding(#) var<storage, read> outputs: array<f32>;      // [places, width]
@group(0) @binding(#) var<storage, read> added: array<f32>;        // [places, width] of the adjugate experts
@group(0) @binding(#) var<storage, read_write> out: array<f32>;    // [rows, width]

const THREADS: u32 = 256u;
// Experts of a thread.
const EACH: u32 = (EXPERTS + THREADS - 1u) / THREADS;

var<workgroup> counts: array<atomic<u32>, EXPERTS>;
// The pairs and tiles of each thread's experts.
var<workgroup> totals: array<vec2<u32>, THREADS>;

// Sorts pairs into buckets by expert, and cuts the buckets into tiles. Within a bucket, the order is any. One workgroup.
@compute @workgroup_size(256)
fn sort(@builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < EXPERTS; i += THREADS) { atomicStore(&counts[i], 0u); }
    for (var i = thread; i < args.tiles; i += THREADS) { tiles[i] = vec4<u32>(0u); }
    storageBarrier();
    workgroupBarrier();
    for (var i = thread; i < args.pairs; i += THREADS) { atomicAdd(&counts[pairs[i]], 1u); }
    workgroupBarrier();
    let first = EACH * thread;
    let end = min(first + EACH, EXPERTS);
    var mine = vec2<u32>(0u);
    for (var i = first; i < end; i++) {
        let count = atomicLoad(&counts[i]);
        mine += vec2<u32>(count, (count + args.tile - 1u) / args.tile);
    }
    totals[thread] = mine;
    workgroupBarrier();
    var at = vec2<u32>(0u);
    for (var i = 0u; i < thread; i++) { at += totals[i]; }
    for (var i = first; i < end; i++) {
        let count = atomicLoad(&counts[i]);
        atomicStore(&counts[i], at.x);
        for (var place = 0u; place < count; place += args.tile) {
            tiles[at.y] = vec4<u32>(i, at.x + place, min(args.tile, count - place), 0u);
            at.y++;
        }
        at.x += count;
    }
    workgroupBarrier();
    for (var i = thread; i < args.pairs; i += THREADS) {
        let place = atomicAdd(&counts[pairs[i]], 1u);
        tokens[place] = i / args.top_k;
        places[i] = place;
    }
}

// out[t] = the sum of weight * output, in the order of ranks
@compute @workgroup_size(256)
fn combine(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = THREADS * group.x + thread;
    if i >= args.width { return; }
    var sum = 0.0;
    for (var k = 0u; k < args.top_k; k++) {
        let pair = group.y * args.top_k + k;
        var place = pair;
        if args.sorted == 1u { place = places[pair]; }
        var output = outputs[place * args.width + i];
        if args.adjugate == 1u { output = fma(args.factor, added[place * args.width + i], output); }
        sum = fma(weights[pair], output, sum);
    }
    out[group.y * args.width + i] = sum;
}
