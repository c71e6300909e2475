//! Compares the scalar kernels with the simplest possible arithmetic in f64.

use std::f64::consts::PI;

use forebay_kernels::scalar::{self, AttentionStep, KvRef, RopePairs, RunningSoftmax};
use forebay_kernels::{
    Activation, DeltaStep, Encoding, Gate, KEY_BLOCK, MatRef, Q8Panel, Rows, STATE_COLUMNS, Tap, TileMut,
};
use forebay_testing::{assert_same_bits, relative_error};
use half::f16;

use crate::common::{Random, Stored, block_len, encodings, quantised};

fn naive_matmul(w: MatRef<'_>, x: &[f32]) -> Vec<f64> {
    let mut row = vec![0.0; w.cols];
    let tokens = x.len() / w.cols;
    let mut out = vec![0.0; tokens * w.rows];
    for r in 0..w.rows {
        w.dequantise_row(r, &mut row);
        for t in 0..tokens {
            let x = &x[t * w.cols..][..w.cols];
            out[t * w.rows + r] = row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
        }
    }
    out
}

fn shapes(encoding: Encoding) -> impl Iterator<Item = (usize, usize, usize)> {
    let block = block_len(encoding);
    let ragged = if block == 1 { 7 } else { 0 };
    [(1, block * 3 + ragged, 4), (5, block * 8 + ragged, 3), (3, block, 17), (2, block * 9, 40)].into_iter()
}

#[test]
fn matmul_with_f32_activations_is_the_sum_of_products() {
    let mut random = Random(1);
    for encoding in encodings() {
        for (rows, cols, tokens) in shapes(encoding) {
            let stored = Stored::random(&mut random, encoding, rows, cols);
            let w = stored.view();
            let x = random.normals(tokens * cols);
            let mut out = vec![f32::NAN; tokens * rows];
            scalar::matmul_f32(w, Rows::new(&x, cols), &mut TileMut::new(&mut out, rows));
            let error = relative_error(&out, &naive_matmul(w, &x));
            assert!(error < 3e-6, "{encoding} [{rows}, {cols}] × {tokens}: {error}");
        }
    }
}

#[test]
fn matmul_transposed_is_the_sum_of_scaled_rows() {
    let mut random = Random(11);
    for encoding in encodings() {
        for (rows, cols, tokens) in shapes(encoding) {
            let stored = Stored::random(&mut random, encoding, rows, cols);
            let w = stored.view();
            // The rows of a part of longer ones.
            let x = random.normals(tokens * (rows + 3));
            let part = Rows::new(&x, rows + 3).columns(2..rows + 2);
            let mut out = vec![f32::NAN; tokens * cols];
            scalar::matmul_transposed(w, part, &mut TileMut::new(&mut out, cols));
            let mut expected = vec![0.0; tokens * cols];
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                w.dequantise_row(r, &mut row);
                for (t, expected) in expected.chunks_exact_mut(cols).enumerate() {
                    let x = f64::from(x[t * (rows + 3) + 2 + r]);
                    expected.iter_mut().zip(&row).for_each(|(sum, &w)| *sum += x * f64::from(w));
                }
            }
            let error = relative_error(&out, &expected);
            assert!(error < 3e-6, "{encoding} [{rows}, {cols}] × {tokens}: {error}");
        }
    }
}

#[test]
fn matmul_with_quantised_activations_is_within_a_percent() {
    let mut random = Random(2);
    for encoding in quantised() {
        let (rows, cols, tokens) = (24, 1024, 19);
        let stored = Stored::random(&mut random, encoding, rows, cols);
        let w = stored.view();
        let x = random.normals(tokens * cols);
        let width = Q8Panel::count(cols);
        let mut panels = vec![Q8Panel::default(); tokens * width];
        for (x, panels) in x.chunks_exact(cols).zip(panels.chunks_exact_mut(width)) {
            scalar::quantise(x, encoding.activation_block().unwrap(), panels);
        }
        let mut out = vec![f32::NAN; tokens * rows];
        scalar::matmul_q8(w, Rows::new(&panels, width), &mut TileMut::new(&mut out, rows));
        let error = relative_error(&out, &naive_matmul(w, &x));
        assert!(error < 1e-2, "{encoding}: {error}");
        // Much closer to the product with the quantised activations.
        let rounded: Vec<f32> =
            panels.iter().flat_map(|p| (0..256).map(|i| f32::from(p.lanes[i]) * p.scales[i / 32])).collect();
        let error = relative_error(&out, &naive_matmul(w, &rounded));
        assert!(error < 2e-6, "{encoding}: {error} from the same integers");
    }
}

#[test]
fn one_token_has_the_bits_it_has_among_many() {
    let mut random = Random(3);
    for encoding in encodings() {
        let (rows, cols, tokens) = (7, 512, 37);
        let stored = Stored::random(&mut random, encoding, rows, cols);
        let w = stored.view();
        let x = random.normals(tokens * cols);
        let mut many = vec![0.0; tokens * rows];
        scalar::matmul_f32(w, Rows::new(&x, cols), &mut TileMut::new(&mut many, rows));
        for t in (0..tokens).rev() {
            let mut one = vec![0.0; rows];
            let index = [t as u32];
            scalar::matmul_f32(w, Rows::indexed(&x, cols, &index), &mut TileMut::new(&mut one, rows));
            assert_same_bits(&one, &many[t * rows..][..rows], &format!("{encoding}, token {t}"));
        }
    }
}

#[test]
fn quantised_activations_are_within_half_a_step() {
    let mut random = Random(4);
    for block in [32, 64, 128, 256] {
        for len in [32, 256, 352, 1024] {
            let x: Vec<f32> = random.normals(len).iter().map(|v| v * 10.0).collect();
            let mut panels = vec![Q8Panel::default(); Q8Panel::count(len)];
            scalar::quantise(&x, block, &mut panels);
            for (i, &x) in x.iter().enumerate() {
                let panel = &panels[i / 256];
                let (lane, scale) = (panel.lanes[i % 256], panel.scales[i % 256 / 32]);
                assert!((f32::from(lane) * scale - x).abs() <= scale * 0.5001, "{i}: {x}");
            }
            for panel in &panels {
                for (sum, lanes) in panel.sums.iter().zip(panel.lanes.chunks_exact(16)) {
                    assert_eq!(i32::from(*sum), lanes.iter().map(|&l| i32::from(l)).sum::<i32>());
                }
            }
        }
    }
}

#[test]
fn a_block_of_zeros_is_zero_and_a_nan_is_not_hidden() {
    let mut panels = vec![Q8Panel::default()];
    scalar::quantise(&[0.0; 256], 256, &mut panels);
    assert!(panels[0].lanes.iter().all(|&l| l == 0) && panels[0].scales == [0.0; 8]);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = [1.0; 256];
        x[100] = bad;
        scalar::quantise(&x, 32, &mut panels);
        assert!(!panels[0].scales[3].is_finite() && panels[0].scales[2].is_finite());
    }
}

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square() {
    let mut random = Random(5);
    for len in [1, 16, 31, 256, 1000] {
        let (x, w) = (random.normals(len), random.normals(len));
        let mut out = x.clone();
        scalar::rms_norm(&mut out, &w, 1e-6);
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / len as f64;
        let expected: Vec<f64> =
            x.iter().zip(&w).map(|(&x, &w)| f64::from(x) / (mean + 1e-6).sqrt() * f64::from(w)).collect();
        assert!(relative_error(&out, &expected) < 1e-6);
    }
}

#[test]
fn rope_turns_pairs_and_leaves_the_rest() {
    let (cos, sin) = ([0.6, 0.0], [0.8, 1.0]);
    let head = [1.0, 2.0, 3.0, 4.0, 5.0];
    let mut x = [head, head].concat();
    scalar::rope(&mut x, 5, RopePairs::HalfSplit, &cos, &sin);
    let turned = [0.6 - 0.8 * 3.0, -4.0, 0.6 * 3.0 + 0.8, 2.0, 5.0];
    assert!(relative_error(&x, &[turned, turned].concat()) < 1e-6, "{x:?}");

    let mut x = head;
    scalar::rope(&mut x, 5, RopePairs::Interleaved, &cos, &sin);
    let turned = [0.6 - 0.8 * 2.0, 0.6 * 2.0 + 0.8, -4.0, 3.0, 5.0];
    assert!(relative_error(&x, &turned) < 1e-6, "{x:?}");
}

#[test]
fn softmax_sums_to_one_and_survives_large_numbers() {
    let mut random = Random(6);
    for len in [1, 15, 16, 128, 1000] {
        let x: Vec<f32> = random.normals(len).iter().map(|v| v * 3.0 + 500.0).collect();
        let mut out = x.clone();
        scalar::softmax(&mut out);
        let weights: Vec<f64> = x.iter().map(|&x| (f64::from(x) - 500.0).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let expected: Vec<f64> = weights.iter().map(|w| w / sum).collect();
        assert!(relative_error(&out, &expected) < 1e-6, "{len}");
    }
}

#[test]
fn attention_in_steps_is_attention_over_all_keys() {
    let mut random = Random(7);
    for (count, head_dim, value_dim, heads) in
        [(1, 32, 32, 1), (64, 128, 128, 2), (150, 64, 32, 3), (333, 24, 40, 8)]
    {
        let queries = random.normals(heads * head_dim);
        let keys = random.normals(count * head_dim);
        let values = random.normals(count * value_dim);
        let half = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
        let (keys16, values16) = (half(&keys), half(&values));
        let widen = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        for f16_cache in [false, true] {
            let mut running = vec![RunningSoftmax::START; heads];
            let mut out = vec![0.0; heads * value_dim];
            for start in (0..count).step_by(KEY_BLOCK) {
                let end = count.min(start + KEY_BLOCK);
                let (k, v) = (start * head_dim..end * head_dim, start * value_dim..end * value_dim);
                let (keys, values) = if f16_cache {
                    (KvRef::F16(&keys16[k]), KvRef::F16(&values16[v]))
                } else {
                    (KvRef::F32(&keys[k]), KvRef::F32(&values[v]))
                };
                let (queries, value_stride, scale) = (&queries, value_dim, 0.3);
                let step = AttentionStep { queries, keys, values, head_dim, value_dim, value_stride, scale };
                scalar::attend(&step, &mut running, &mut out);
            }
            scalar::attend_finish(&running, &mut out);
            let (keys, values) =
                if f16_cache { (widen(&keys16), widen(&values16)) } else { (keys.clone(), values.clone()) };
            let mut expected = Vec::new();
            for q in queries.chunks_exact(head_dim) {
                let score = |k: &[f32]| q.iter().zip(k).map(|(&q, &k)| f64::from(q * k)).sum::<f64>() * 0.3;
                let weights: Vec<f64> = keys.chunks_exact(head_dim).map(|k| score(k).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for c in 0..value_dim {
                    let column = values.chunks_exact(value_dim).map(|v| f64::from(v[c]));
                    expected.push(weights.iter().zip(column).map(|(w, v)| w * v).sum::<f64>() / sum);
                }
            }
            let error = relative_error(&out, &expected);
            assert!(error < 1e-5, "{count} keys, f16 {f16_cache}: {error}");
        }
    }
}

/// The gap between two values is not read.
#[test]
fn values_may_lie_inside_the_keys() {
    let (head_dim, value_dim) = (12, 8);
    let mut random = Random(10);
    let (queries, keys) = (random.normals(2 * head_dim), random.normals(5 * head_dim));
    let values: Vec<f32> = keys.chunks_exact(head_dim).flat_map(|key| key[3..11].to_vec()).collect();
    let run = |values: &[f32], value_stride: usize| {
        let (keys, values) = (KvRef::F32(&keys), KvRef::F32(values));
        let (queries, scale) = (&queries, 0.3);
        let step = AttentionStep { queries, keys, values, head_dim, value_dim, value_stride, scale };
        let mut out = vec![0.0; 2 * value_dim];
        scalar::attend(&step, &mut [RunningSoftmax::START; 2], &mut out);
        out
    };
    assert_eq!(run(&keys[3..], head_dim), run(&values, value_dim));
}

#[test]
fn activations_and_sums_do_what_they_say() {
    let mut random = Random(8);
    let (gate, up) = (random.normals(100), random.normals(100));
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let gelu = |g: f64| g / 2.0 * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh());
    let clamped = |g: f64, u: f64| {
        let g = g.min(0.5);
        (u.clamp(-0.5, 0.5) + 1.0) * g / (1.0 + (-1.702 * g).exp())
    };
    type Function<'a> = &'a dyn Fn(f64, f64) -> f64;
    let functions: [(Activation, Function<'_>); 7] = [
        (Activation::SwiGlu, &|g, u| silu(g) * u),
        (Activation::Clamped { alpha: 1.702, limit: 0.5 }, &clamped),
        (Activation::ClippedBefore(0.5), &|g, u| silu(g.min(0.5)) * u.clamp(-0.5, 0.5)),
        (Activation::ClippedAfter(0.3), &|g, u| silu(g).min(f64::from(0.3f32)) * u.clamp(-0.3, 0.3)),
        (Activation::GeGlu, &|g, u| gelu(g) * u),
        (Activation::ReGlu, &|g, u| g.max(0.0) * u),
        (Activation::ReluSquared, &|x, _| x.max(0.0).powi(2)),
    ];
    for (activation, function) in functions {
        let mut out = gate.clone();
        let count = |numbers: usize| if activation.is_gated() { numbers } else { 0 };
        scalar::activate(&mut out, &up[..count(up.len())], activation);
        let pairs = gate.iter().zip(&up);
        let expected: Vec<f64> = pairs.map(|(&g, &u)| function(g.into(), u.into())).collect();
        assert!(relative_error(&out, &expected) < 1e-6, "{activation:?}");
        let mut broken = [f32::NAN];
        scalar::activate(&mut broken, &[1.0][..count(1)], activation);
        assert!(broken[0].is_nan(), "{activation:?}");
    }

    let mut out = gate.clone();
    scalar::add(&mut out, &up);
    scalar::add_scaled(&mut out, 0.5, &up);
    let expected: Vec<f64> = gate.iter().zip(&up).map(|(&g, &u)| f64::from(g) + 1.5 * f64::from(u)).collect();
    assert!(relative_error(&out, &expected) < 1e-6);

    for cap in [0.3, 30.0] {
        let mut out = gate.clone();
        scalar::softcap(&mut out, cap);
        let cap = f64::from(cap);
        let expected: Vec<f64> = gate.iter().map(|&x| cap * (f64::from(x) / cap).tanh()).collect();
        assert!(relative_error(&out, &expected) < 3e-6, "{cap}");
    }
}

#[test]
fn gates_multiply_numbers_or_groups_of_them() {
    let mut random = Random(10);
    let (x, logits) = (random.normals(100), random.normals(100));
    let functions: [(Gate, &dyn Fn(f64) -> f64); 3] = [
        (Gate::Sigmoid, &|g| 1.0 / (1.0 + (-g).exp())),
        (Gate::Softplus, &|g| (1.0 + g.exp()).ln()),
        (Gate::Factor, &|g| g),
    ];
    for (gate, function) in functions {
        for count in [100, 20, 1] {
            let mut out = x.clone();
            scalar::gate(&mut out, &logits[..count], gate);
            let factor = |i: usize| function(logits[i * count / 100].into());
            let expected: Vec<f64> = x.iter().enumerate().map(|(i, &x)| f64::from(x) * factor(i)).collect();
            assert!(relative_error(&out, &expected) < 1e-6, "{gate:?}, {count} logits");
        }
    }
}

#[test]
fn a_layer_norm_subtracts_the_mean_first() {
    let mut random = Random(12);
    let (x, w) = (random.normals(100), random.normals(100));
    let x: Vec<f32> = x.iter().map(|x| x + 0.7).collect();
    let mut out = x.clone();
    scalar::layer_norm(&mut out, &w, 1e-3);
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / 100.0;
    let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / 100.0;
    let scale = 1.0 / (variance + 1e-3).sqrt();
    let expected: Vec<f64> =
        x.iter().zip(&w).map(|(&x, &w)| (f64::from(x) - mean) * scale * f64::from(w)).collect();
    assert!(relative_error(&out, &expected) < 1e-5);
}

#[test]
fn a_convolution_adds_up_its_taps_before_it_is_activated() {
    let mut random = Random(11);
    let (w, x) = (random.normals(4 * 50), random.normals(4 * 50));
    let taps: Vec<Tap<'_>> = w.chunks(50).zip(x.chunks(50)).map(|(w, x)| Tap { w, x }).collect();
    let mut out = vec![f32::NAN; 50];
    scalar::convolve(&taps, &mut out);
    let sum = |c: usize| taps.iter().map(|tap| f64::from(tap.w[c]) * f64::from(tap.x[c])).sum::<f64>();
    let expected: Vec<f64> = (0..50).map(sum).collect();
    assert!(relative_error(&out, &expected) < 1e-6);
    scalar::activate_silu(&mut out);
    let activated: Vec<f64> = expected.iter().map(|sum| sum / (1.0 + (-sum).exp())).collect();
    assert!(relative_error(&out, &activated) < 1e-6);
}

#[test]
fn l2_norm_gives_a_vector_its_length() {
    let x = Random(12).normals(50);
    let mut out = x.clone();
    scalar::l2_norm(&mut out, 1e-2, 0.5);
    let square: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
    let expected: Vec<f64> = x.iter().map(|&x| f64::from(x) * 0.5 / (square + 1e-2).sqrt()).collect();
    assert!(relative_error(&out, &expected) < 1e-6);
}

#[test]
fn gates_of_the_delta_rule_are_what_their_formulas_say() {
    let mut random = Random(13);
    let [a, b, rates, biases] = [0; 4].map(|_| random.normals(40));
    let rates: Vec<f32> = rates.iter().map(|rate| -rate.abs()).collect();
    let (mut keep, mut correct) = (a.clone(), b.clone());
    scalar::delta_gates(&mut keep, &mut correct, &rates, &biases);
    let expected = |i: usize| {
        let softplus = (f64::from(a[i]) + f64::from(biases[i])).exp().ln_1p();
        (f64::from(rates[i]) * softplus).exp()
    };
    assert!(relative_error(&keep, &(0..40).map(expected).collect::<Vec<_>>()) < 1e-6);
    let expected: Vec<f64> = b.iter().map(|&b| 1.0 / (1.0 + (-f64::from(b)).exp())).collect();
    assert!(relative_error(&correct, &expected) < 1e-6);
}

/// Computed from the formulas line by line, over several tokens, with the state in place and moved.
#[test]
fn steps_of_the_delta_rule_are_what_its_formulas_say() {
    const C: usize = STATE_COLUMNS;
    let mut random = Random(14);
    for key_dim in [1, 2, 15, 16, 128] {
        let mut state = vec![0.0f32; key_dim * C];
        let mut expected_state = vec![0.0f64; key_dim * C];
        for token in 0..12 {
            let (q, mut k) = (random.normals(key_dim), random.normals(key_dim));
            scalar::l2_norm(&mut k, 1e-6, 1.0);
            let v: [f32; C] = random.normals(C).try_into().unwrap();
            let (keep, correct) = (random.unit().abs(), random.unit().abs());
            let step = DeltaStep { q: &q, k: &k, v: &v, keep, correct };
            let mut out = [f32::NAN; C];
            if token % 3 == 1 {
                let before = std::mem::replace(&mut state, vec![f32::NAN; key_dim * C]);
                scalar::delta_step(&step, Some(&before), &mut state, &mut out);
            } else {
                scalar::delta_step(&step, None, &mut state, &mut out);
            }

            let mut expected = vec![0.0; C];
            for c in 0..C {
                let mut column: Vec<f64> =
                    (0..key_dim).map(|i| f64::from(keep) * expected_state[i * C + c]).collect();
                let found: f64 = column.iter().zip(&k).map(|(s, &k)| s * f64::from(k)).sum();
                let delta = f64::from(correct) * (f64::from(v[c]) - found);
                for (s, &k) in column.iter_mut().zip(&k) {
                    *s += f64::from(k) * delta;
                }
                expected[c] = column.iter().zip(&q).map(|(s, &q)| s * f64::from(q)).sum();
                for (i, s) in column.into_iter().enumerate() {
                    expected_state[i * C + c] = s;
                }
            }
            assert!(relative_error(&out, &expected) < 1e-5, "{key_dim} rows, token {token}");
            assert!(relative_error(&state, &expected_state) < 1e-5, "{key_dim} rows, token {token}");
        }
    }
}

#[test]
fn top_k_is_sorted_and_ties_go_to_the_lower_index() {
    let mut out = [9; 4];
    scalar::top_k(&[1.0, 3.0, f32::NAN, 3.0, 2.0, 3.0], &mut out);
    assert_eq!(out, [1, 3, 5, 4]);
    let mut out = [9; 3];
    scalar::top_k(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], &mut out);
    assert_eq!(out, [0, 1, 2]);
    let mut random = Random(9);
    for _ in 0..100 {
        let scores: Vec<f32> = (0..50).map(|_| (random.unit() * 8.0).round()).collect();
        let mut expected: Vec<u32> = (0..50).collect();
        expected.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
        let mut out = [0; 12];
        scalar::top_k(&scores, &mut out);
        assert_eq!(out, expected[..12]);
    }
}
