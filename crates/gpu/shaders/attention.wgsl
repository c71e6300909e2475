
// Attention of single rows, of any shape.

// Stores keys and values of all rows.
@compute @workgroup_size(128)
fn append(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let each = OWN_FOURS + VALUE_FOURS;
    let i = THREADS * group.x + thread;
    if i < KV_HEADS * each { append_four(group.y, i / each, i % each); }
}

// How the threads share heads and channels of values.
const LANES: u32 = min(THREADS, 1u << (32u - countLeadingZeros(VALUE_FOURS - 1u)));
const STEP: u32 = THREADS / LANES;
const HEADS_EACH: u32 = (HEADS + STEP - 1u) / STEP;
const FOURS_EACH: u32 = (VALUE_FOURS + LANES - 1u) / LANES;
const EACH: u32 = HEADS_EACH * FOURS_EACH;
// How they share heads and keys: for the scores, and for the softmax.
const SCORES_EACH: u32 = (HEADS + 1u) / 2u;
const SOFT_LANES: u32 = THREADS / HEADS;
const KEYS_EACH: u32 = (PAGE + SOFT_LANES - 1u) / SOFT_LANES;

// Queries, then the row's own key.
var<workgroup> queries: array<vec4<f32>, (HEADS + 1u) * KEY_FOURS>;
var<workgroup> scores: array<f32, HEADS * PAGE>;
var<workgroup> highs: array<f32, HEADS>;
var<workgroup> factors: array<f32, HEADS>;

// Norms and rotates heads from number `first` on, as rotate.wgsl does, with 16 threads for each.
fn prepare(thread: u32, row: u32, first: u32, count: u32) {
    let of_k = first == HEADS;
    let is_one = thread / 16u < count;
    let at = (first + select(0u, thread / 16u, is_one)) * KEY_FOURS;
    let lane = thread % 16u;
    if select(args.q_normed, args.k_normed, of_k) != 0u {
        var squares = 0.0;
        for (var i = lane; i < KEY_FOURS; i += 16u) { squares = product(queries[at + i], queries[at + i], squares); }
        let scale = 1.0 / sqrt(sum_threads(thread, squares, 16u) / f32(KEY_DIM) + args.eps);
        for (var i = lane; is_one && i < KEY_FOURS; i += 16u) {
            if of_k {
                queries[at + i] = queries[at + i] * scale * k_norm[i];
            } else {
                queries[at + i] = queries[at + i] * scale * q_norm[i];
            }
        }
        workgroupBarrier();
    }
    let fours = args.half / 4u;
    let from_angle = row * 2u * fours;
    if args.interleaved != 0u {
        for (var i = lane; is_one && i < 2u * fours; i += 16u) {
            let cosines = angles[from_angle + i / 2u];
            let sines = angles[from_angle + fours + i / 2u];
            let c = select(cosines.xy, cosines.zw, i % 2u == 1u).xxyy;
            let s = select(sines.xy, sines.zw, i % 2u == 1u).xxyy;
            let x = queries[at + i];
            queries[at + i] = fma(x, c, x.yxwz * s * vec4<f32>(-1.0, 1.0, -1.0, 1.0));
        }
    } else {
        for (var i = lane; is_one && i < fours; i += 16u) {
            let c = angles[from_angle + i];
            let s = angles[from_angle + fours + i];
            let x = queries[at + i];
            let y = queries[at + fours + i];
            queries[at + i] = fma(x, c, -(y * s));
            queries[at + fours + i] = fma(y, c, x * s);
        }
    }
    workgroupBarrier();
}

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
    let stores = args.appends != 0u && group.z == (segments - 1u) % args.splits;
    if PREPARES == 1u {
        let from_k = (row * KV_HEADS + kv_head) * KEY_FOURS;
        if stores {
            for (var i = thread; i < KEY_FOURS; i += THREADS) { queries[HEADS * KEY_FOURS + i] = k[from_k + i]; }
        }
        workgroupBarrier();
        prepare(thread, row, 0u, heads);
        if stores { prepare(thread, row, HEADS, 1u); }
    }
    if stores {
        for (var i = thread; i < OWN_FOURS + VALUE_FOURS; i += THREADS) {
            if PREPARES == 1u && i < OWN_FOURS {
                let place = key_place(kv_head, end - 1u) + i;
                set_cell(page_of(row, end - 1u), place, cell_of(queries[HEADS * KEY_FOURS + i]));
            } else {
                append_four(row, kv_head, i);
            }
        }
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
                for (var first_four = 0u; first_four < KEY_FOURS; first_four += AHEAD) {
                    let fours = cells(page, place + first_four, 1u, place + KEY_FOURS - 1u);
                    for (var j = 0u; j < AHEAD; j++) {
                        let i = first_four + j;
                        if i >= KEY_FOURS { break; }
                        let four = floats_of(fours[j]);
                        for (var n = 0u; n < SCORES_EACH; n++) {
                            let query = queries[min(thread / PAGE + 2u * n, HEADS - 1u) * KEY_FOURS + i];
                            products[n] = product(query, four, products[n]);
                        }
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
            for (var first_key = from_key; first_key < to_key; first_key += AHEAD) {
                for (var m = 0u; m < FOURS_EACH; m++) {
                    let four = min(lane + LANES * m, VALUE_FOURS - 1u);
                    let from_four = value_place(kv_head, first_key) + four;
                    let last_four = value_place(kv_head, to_key - 1u) + four;
                    let values = cells(page, from_four, VALUE_STEP, last_four);
                    for (var j = 0u; j < AHEAD; j++) {
                        let key = first_key + j;
                        if key >= to_key { break; }
                        let value = floats_of(values[j]);
                        for (var n = 0u; n < HEADS_EACH; n++) {
                            let weight = scores[min(own_head + STEP * n, HEADS - 1u) * PAGE + key];
                            let i = n * FOURS_EACH + m;
                            seen[i].sum += weight;
                            seen[i].values = fma(vec4<f32>(weight), value, seen[i].values);
                        }
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
