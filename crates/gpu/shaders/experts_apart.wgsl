
// Experts of few rows of activations, place by place: each 32 threads, a team, compute ROWS rows of every matrix. The
// order of sums does not depend on ROWS.

@group(0) @binding(#) var<storage, read> x: array<f32>;

const TEAMS: u32 = 4u;

// Columns that a team puts into the workgroup's memory at a time.
const CHUNK: u32 = 1024u;

// For each 32 columns nine fours, so that neighbouring threads, each of which reads its own 32 columns, use different
// banks.
var<workgroup> staged: array<vec4<f32>, TEAMS * 288u>;

// Loads a team's columns, of which so many are left from `at` on.
fn stage(team: u32, lane: u32, at: u32, left: u32) {
    for (var i = lane; i < min(CHUNK, (left + 31u) / 32u * 32u); i += 32u) {
        var value = 0.0;
        if i < left { value = x[at + i]; }
        let place = 36u * (32u * team + i / 32u) + i % 32u;
        staged[place / 4u][place % 4u] = value;
    }
}

fn across(four: vec4<f32>) -> f32 { return (four.x + four.y) + (four.z + four.w); }

//each {
// A thread's sums for ROWS rows of slot $.
var<private> sums$: array<f32, ROWS>;

// Adds the products of 32 columns, which are staged from a four on.
fn add_products$(first: u32, index: u32, at: u32) {
    let m = matrices[args.matrix$];
    let planes = planes_in(m, args.ranges$);
    let a = staged[at];
    let b = staged[at + 1u];
    let c = staged[at + 2u];
    let d = staged[at + 3u];
    let e = staged[at + 4u];
    let f = staged[at + 5u];
    let g = staged[at + 6u];
    let h = staged[at + 7u];
    for (var r = 0u; r < ROWS; r++) {
        let w = unpack$(m, planes, min(first + r, m.rows - 1u), index);
        let low = fma(w.lanes[3], d, fma(w.lanes[2], c, fma(w.lanes[1], b, w.lanes[0] * a)));
        let high = fma(w.lanes[7], h, fma(w.lanes[6], g, fma(w.lanes[5], f, w.lanes[4] * e)));
        var sum = fma(w.scale.y, across(high), fma(w.scale.x, across(low), sums$[r]));
        if HAS_MIN$ {
            sum = fma(w.min.x, across((a + b) + (c + d)), sum);
            sum = fma(w.min.y, across((e + f) + (g + h)), sum);
        }
        sums$[r] = sum;
    }
}
//}

@compute @workgroup_size(128)
fn apart(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let job = job_of(group.y);
    if job.count == 0u || !find(job.expert, args.first) { return; }
    let lane = thread % 32u;
    let team = thread / 32u;
    let first = ROWS * (TEAMS * group.x + team);
    let cols = matrices[args.matrix0].cols;
    let start = source_of(job.first) * args.x_width;
    for (var r = 0u; r < ROWS; r++) {
//each {
        sums$[r] = 0.0;
//}
    }
    for (var chunk = 0u; chunk < cols; chunk += TEAMS * CHUNK) {
        let own = chunk + CHUNK * team;
        stage(team, lane, start + own, cols - min(cols, own));
        workgroupBarrier();
        for (var index = lane; 32u * index < min(cols - chunk, TEAMS * CHUNK); index += 32u) {
//each {
            add_products$(first, chunk / 32u + index, 9u * index);
//}
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < ROWS; r++) {
        var products = vec2<f32>(0.0);
//each {
        products[$] = sum_32(thread, sums$[r]);
//}
        if lane == 0u { finish(job.expert, job.first, first + r, products); }
    }
}
