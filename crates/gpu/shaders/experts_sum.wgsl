
var<workgroup> results: array<f32, TEAMS * ROWS>;

// ROWS rows of the products of all experts of a token, one expert for each team at a time, and their weighted sum in the
// order of ranks.
@compute @workgroup_size(128)
fn down_sum(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % 32u;
    let team = thread / 32u;
    let first = ROWS * group.x;
    let m = matrices[args.matrix0];
    var total = 0.0;
    for (var k = 0u; k < args.top_k; k += TEAMS) {
        let pair = group.y * args.top_k + k + team;
        var expert = 0u;
        var found = false;
        if k + team < args.top_k {
            expert = jobs[pair];
            found = find(expert, args.first);
        }
        for (var r = 0u; r < ROWS; r++) { sums0[r] = 0.0; }
        for (var chunk = 0u; chunk < m.cols; chunk += CHUNK) {
            if found { stage(team, lane, pair * args.x_width + chunk, m.cols - chunk); }
            workgroupBarrier();
            if found && 32u * lane < m.cols - chunk {
                add_products0(first, chunk / 32u + lane, 9u * (32u * team + lane));
            }
            workgroupBarrier();
        }
        for (var r = 0u; r < ROWS; r++) {
            let sum = sum_32(thread, sums0[r]);
            if lane == 0u { results[ROWS * team + r] = finished(expert, first + r, sum); }
        }
        workgroupBarrier();
        for (var i = 0u; thread < ROWS && i < min(TEAMS, args.top_k - k); i++) {
            total = fma(weights[group.y * args.top_k + k + i], results[ROWS * i + thread], total);
        }
        workgroupBarrier();
    }
    if thread < ROWS && first + thread < m.rows { out[group.y * m.rows + first + thread] = total; }
}
