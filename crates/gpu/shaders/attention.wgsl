
// Attention over keys and values in pages, of any shape.
//
// A page holds PAGE positions: keys [KV_HEADS, PAGE, KEY_DIM], then values [KV_HEADS, PAGE, VALUE_DIM], or, where values
// are the last channels of their keys (LATENT), keys alone.
//
// Softmax is computed page by page, and anew for each SEGMENT of positions; then the segments are merged in order. Pages
// and segments start at multiples of their length, so neither what a batch consists of nor how segments are divided
// among workgroups changes a bit.

const PAGE: u32 = 64u;
const SEGMENT: u32 = 256u;
const THREADS: u32 = 128u;
// Less than any score.
const LOWEST: f32 = -1e30;

// Groups of four channels.
const KEY_FOURS: u32 = KEY_DIM / 4u;
const VALUE_FOURS: u32 = VALUE_DIM / 4u;
const OWN_FOURS: u32 = KEY_FOURS - LATENT * VALUE_FOURS;

struct Args {
    q_heads: u32,
    rows: u32,
    splits: u32,  // workgroups that share the segments of a row
    segments: u32, // the most segments of a row
    window: u32,  // positions that a query sees, or 0 for all
    chunked: u32, // whether these are the ones of its chunk, instead of the last ones
    appends: u32, // whether keys and values of the rows are still to be stored
    sunk: u32,    // whether there are sinks
    scale: f32,
}
var<immediate> args: Args;

// Of each row the place of its sequence's page table, and its position; then the page tables.
@group(0) @binding(#) var<storage, read> batch: array<u32>;
@group(0) @binding(#) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read> sinks: array<f32>;
@group(0) @binding(#) var<storage, read_write> out: array<vec4<f32>>;
// [rows, segments, q_heads] of the running softmax, then as many values.
@group(0) @binding(#) var<storage, read_write> partial_values: array<vec4<f32>>;
@group(0) @binding(#) var<storage, read_write> partial_sums: array<vec2<f32>>;

// The first position that the last of `end` positions sees.
fn start_of(end: u32) -> u32 {
    if args.window == 0u { return 0u; }
    if args.chunked != 0u { return (end - 1u) / args.window * args.window; }
    return end - min(end, args.window);
}

fn page_of(row: u32, position: u32) -> Piece { return piece_at(batch[batch[2u * row] + position / PAGE]); }

// The first cell of a key and of a value in a page.
fn key_place(kv_head: u32, position: u32) -> u32 { return (kv_head * PAGE + position % PAGE) * KEY_FOURS; }

fn value_place(kv_head: u32, position: u32) -> u32 {
    if LATENT == 1u { return key_place(kv_head, position) + OWN_FOURS; }
    return KV_HEADS * PAGE * KEY_FOURS + (kv_head * PAGE + position % PAGE) * VALUE_FOURS;
}

// Stores four channels of a row's own key and value.
fn append_four(row: u32, kv_head: u32, i: u32) {
    let position = batch[2u * row + 1u];
    let page = page_of(row, position);
    let at = row * KV_HEADS + kv_head;
    if i < OWN_FOURS {
        set_cell(page, key_place(kv_head, position) + i, cell_of(k[at * OWN_FOURS + i]));
    } else {
        let channel = i - OWN_FOURS;
        set_cell(page, value_place(kv_head, position) + channel, cell_of(v[at * VALUE_FOURS + channel]));
    }
}

// Stores keys and values of all rows.
@compute @workgroup_size(128)
fn append(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let each = OWN_FOURS + VALUE_FOURS;
    let i = THREADS * group.x + thread;
    if i < KV_HEADS * each { append_four(group.y, i / each, i % each); }
}

// What the softmax of one query has seen: the highest score, the sum of the exponentials, and four channels of the
// weighted sum of values.
struct Seen { high: f32, sum: f32, values: vec4<f32> }

fn nothing_seen() -> Seen { return Seen(LOWEST, 0.0, vec4<f32>(0.0)); }

fn merged(a: Seen, b: Seen) -> Seen {
    let high = max(a.high, b.high);
    let of_a = exp(a.high - high);
    let of_b = exp(b.high - high);
    let values = fma(a.values, vec4<f32>(of_a), b.values * of_b);
    return Seen(high, fma(a.sum, of_a, b.sum * of_b), values);
}

// The four channels of attention's output.
fn finished(seen: Seen, head: u32) -> vec4<f32> {
    var all = seen;
    if args.sunk != 0u { all = merged(all, Seen(sinks[head], 1.0, vec4<f32>(0.0))); }
    return all.values / all.sum;
}

fn partial_at(row: u32, segment: u32, head: u32) -> u32 {
    return (row * args.segments + segment) * args.q_heads + head;
}

// How the threads share heads and channels of values.
const LANES: u32 = LANES_OF_VALUES;
const STEP: u32 = THREADS / LANES;
const HEADS_EACH: u32 = (HEADS + STEP - 1u) / STEP;
const FOURS_EACH: u32 = (VALUE_FOURS + LANES - 1u) / LANES;
const EACH: u32 = HEADS_EACH * FOURS_EACH;
// How they share heads and keys: for the scores, and for the softmax.
const SCORES_EACH: u32 = (HEADS + 1u) / 2u;
const SOFT_LANES: u32 = THREADS / HEADS;
const KEYS_EACH: u32 = (PAGE + SOFT_LANES - 1u) / SOFT_LANES;

var<workgroup> queries: array<vec4<f32>, HEADS * KEY_FOURS>;
var<workgroup> scores: array<f32, HEADS * PAGE>;
var<workgroup> highs: array<f32, HEADS>;
var<workgroup> factors: array<f32, HEADS>;

// A workgroup computes one row and up to HEADS query heads of one key head, and every `splits`th segment.
@compute @workgroup_size(128)
fn attend(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let sharing = args.q_heads / KV_HEADS;
    let tiles = (sharing + HEADS - 1u) / HEADS;
    let kv_head = group.x / tiles;
    let in_group = group.x % tiles * HEADS;
    let heads = min(HEADS, sharing - in_group);
    let first_head = kv_head * sharing + in_group;
    let row = group.y;
    let end = batch[2u * row + 1u] + 1u;
    let start = start_of(end);
    let first_segment = start / SEGMENT;
    let segments = (end + SEGMENT - 1u) / SEGMENT - first_segment;
    if group.z >= segments { return; }

    let from_q = (row * args.q_heads + first_head) * KEY_FOURS;
    for (var i = thread; i < heads * KEY_FOURS; i += THREADS) { queries[i] = q[from_q + i]; }
    if args.appends != 0u && group.z == (segments - 1u) % args.splits {
        for (var i = thread; i < OWN_FOURS + VALUE_FOURS; i += THREADS) { append_four(row, kv_head, i); }
    }
    storageBarrier();
    workgroupBarrier();

    let lane = thread % LANES;
    let own_head = thread / LANES;
    let soft_head = thread / SOFT_LANES;
    let soft_lane = thread % SOFT_LANES;
    var all: array<Seen, EACH>;
    for (var i = 0u; i < EACH; i++) { all[i] = nothing_seen(); }
    for (var segment = group.z; segment < segments; segment += args.splits) {
        let segment_start = (first_segment + segment) * SEGMENT;
        let last = min(end, segment_start + SEGMENT);
        var seen: array<Seen, EACH>;
        for (var i = 0u; i < EACH; i++) { seen[i] = nothing_seen(); }
        var soft_high = LOWEST;
        for (var first = max(start, segment_start) / PAGE * PAGE; first < last; first += PAGE) {
            let page = page_of(row, first);
            let from_key = max(start, first) - first;
            let to_key = min(PAGE, last - first);

            // Each thread computes the scores of one key and every second head.
            let key = thread % PAGE;
            var products: array<f32, SCORES_EACH>;
            for (var n = 0u; n < SCORES_EACH; n++) { products[n] = 0.0; }
            if key >= from_key && key < to_key {
                let place = key_place(kv_head, key);
                for (var i = 0u; i < KEY_FOURS; i++) {
                    let four = floats_of(cell(page, place + i));
                    for (var n = 0u; n < SCORES_EACH; n++) {
                        let query = queries[min(thread / PAGE + 2u * n, HEADS - 1u) * KEY_FOURS + i];
                        products[n] = product(query, four, products[n]);
                    }
                }
            }
            for (var n = 0u; n < SCORES_EACH; n++) {
                let head = thread / PAGE + 2u * n;
                if head < HEADS { scores[head * PAGE + key] = products[n] * args.scale; }
            }
            workgroupBarrier();

            var high = soft_high;
            for (var i = 0u; i < KEYS_EACH; i++) {
                let key = soft_lane + SOFT_LANES * i;
                if key >= from_key && key < to_key { high = max(high, scores[soft_head * PAGE + key]); }
            }
            high = max_threads(thread, high, SOFT_LANES);
            for (var i = 0u; i < KEYS_EACH; i++) {
                let key = soft_lane + SOFT_LANES * i;
                if key >= from_key && key < to_key {
                    scores[soft_head * PAGE + key] = exp(scores[soft_head * PAGE + key] - high);
                }
            }
            if soft_lane == 0u {
                highs[soft_head] = high;
                factors[soft_head] = exp(soft_high - high);
            }
            soft_high = high;
            workgroupBarrier();

            for (var n = 0u; n < HEADS_EACH; n++) {
                let head = min(own_head + STEP * n, HEADS - 1u);
                for (var m = 0u; m < FOURS_EACH; m++) {
                    let i = n * FOURS_EACH + m;
                    seen[i].high = highs[head];
                    seen[i].sum *= factors[head];
                    seen[i].values *= factors[head];
                }
            }
            for (var key = from_key; key < to_key; key++) {
                let place = value_place(kv_head, key);
                for (var m = 0u; m < FOURS_EACH; m++) {
                    let value = floats_of(cell(page, place + min(lane + LANES * m, VALUE_FOURS - 1u)));
                    for (var n = 0u; n < HEADS_EACH; n++) {
                        let weight = scores[min(own_head + STEP * n, HEADS - 1u) * PAGE + key];
                        let i = n * FOURS_EACH + m;
                        seen[i].sum += weight;
                        seen[i].values = fma(vec4<f32>(weight), value, seen[i].values);
                    }
                }
            }
            workgroupBarrier();
        }
        for (var n = 0u; n < HEADS_EACH; n++) {
            let head = own_head + STEP * n;
            for (var m = 0u; m < FOURS_EACH; m++) {
                let i = n * FOURS_EACH + m;
                let four = lane + LANES * m;
                all[i] = merged(all[i], seen[i]);
                if args.splits == 1u || head >= heads || four >= VALUE_FOURS { continue; }
                let at = partial_at(row, segment, first_head + head);
                partial_values[at * VALUE_FOURS + four] = seen[i].values;
                if four == 0u { partial_sums[at] = vec2<f32>(seen[i].high, seen[i].sum); }
            }
        }
    }
    if args.splits > 1u { return; }
    for (var n = 0u; n < HEADS_EACH; n++) {
        let head = own_head + STEP * n;
        for (var m = 0u; m < FOURS_EACH; m++) {
            let four = lane + LANES * m;
            if head >= heads || four >= VALUE_FOURS { continue; }
            let to = (row * args.q_heads + first_head + head) * VALUE_FOURS + four;
            out[to] = finished(all[n * FOURS_EACH + m], first_head + head);
        }
    }
}

// The product of four channels, added in order.
fn product(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// Merges the segments of a row.
@compute @workgroup_size(128)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = THREADS * group.x + thread;
    let head = i / VALUE_FOURS;
    let row = group.y;
    if head >= args.q_heads { return; }
    let end = batch[2u * row + 1u] + 1u;
    let segments = (end + SEGMENT - 1u) / SEGMENT - start_of(end) / SEGMENT;
    var all = nothing_seen();
    for (var segment = 0u; segment < segments; segment++) {
        let at = partial_at(row, segment, head);
        let sums = partial_sums[at];
        all = merged(all, Seen(sums.x, sums.y, partial_values[at * VALUE_FOURS + i % VALUE_FOURS]));
    }
    out[row * args.q_heads * VALUE_FOURS + i] = finished(all, head);
}
