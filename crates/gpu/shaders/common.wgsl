// What all kernels share.

const INFINITE: f32 = 3.4028234e38;

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }

fn softplus(x: f32) -> f32 {
    // Beyond this the difference is less than half a unit in the last place.
    if x > 20.0 { return x; }
    return log(1.0 + exp(x));
}

// Of large numbers, some drivers' own function is not a number.
fn bounded_tanh(x: f32) -> f32 {
    let e = exp(-2.0 * abs(x));
    return sign(x) * (1.0 - e) / (1.0 + e);
}

struct Activation { kind: u32, alpha: f32, limit: f32 }

// The order is that of `put_activation` in backend/mod.rs.
fn activate(gate: f32, up: f32, a: Activation) -> f32 {
    switch a.kind {
        case 1u: {
            let g = min(gate, a.limit);
            return (clamp(up, -a.limit, a.limit) + 1.0) * g * sigmoid(a.alpha * g);
        }
        case 2u: {
            let g = min(gate, a.limit);
            return g * sigmoid(g) * clamp(up, -a.limit, a.limit);
        }
        case 3u: { return min(gate * sigmoid(gate), a.limit) * clamp(up, -a.limit, a.limit); }
        case 4u: {
            let inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
            return 0.5 * gate * (1.0 + bounded_tanh(inner)) * up;
        }
        case 5u: { return max(gate, 0.0) * up; }
        case 6u: { return max(gate, 0.0) * max(gate, 0.0); }
        default: { return gate * sigmoid(gate) * up; }
    }
}
