//! Runs all kernels with all types, ragged shapes and instruction sets. Each must give the scalar kernel's bits.

use forebay_kernels::scalar::{AttentionStep, KvRef, RopePairs, RunningSoftmax};
use forebay_kernels::{
    Activation, DType, DeltaStep, Encoding, Gate, Isa, KEY_BLOCK, Kernels, MatRef, Planes, Q8Panel, Rows,
    STATE_COLUMNS, Tap, TileMut, Tiles,
};
use forebay_testing::assert_same_bits;
use half::f16;

use crate::common::{Random, Stored, block_len, encodings, quantised};

/// Calls `check` with every instruction set of this CPU except the scalar one.
fn each_isa(check: impl Fn(&'static Kernels, &'static Kernels)) {
    for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Scalar) {
        eprintln!("{}", isa.name());
        check(Kernels::for_isa(isa), Kernels::for_isa(Isa::Scalar));
    }
}

/// Like [`assert_same_bits`], for inputs whose results may not be finite: any NaN equals any other.
fn assert_same_bits_or_nan(ours: &[f32], scalar: &[f32], what: &str) {
    assert_eq!(ours.len(), scalar.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(scalar).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}, element {i}: {a}, not {b}");
    }
}

/// Rows, blocks of columns, tokens.
const SHAPES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (16, 1, 1),
    (17, 3, 1),
    (48, 8, 1),
    (5, 2, 2),
    (16, 1, 3),
    (33, 2, 7),
    (20, 3, 8),
    (16, 9, 13),
    (31, 2, 40),
    (16, 1, 150),
];

#[test]
fn products_with_quantised_activations_have_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(1);
        for encoding in quantised() {
            for &(rows, blocks, tokens) in SHAPES {
                let cols = blocks * block_len(encoding);
                let stored = Stored::random(&mut random, encoding, rows, cols);
                let w = stored.view();
                let width = Q8Panel::count(cols);
                let mut panels = vec![Q8Panel::default(); (tokens + 1) * width];
                for panels in panels.chunks_exact_mut(width) {
                    // Some panels hold the largest values that the integers must hold.
                    let extreme = random.bits().is_multiple_of(3);
                    let x: Vec<f32> = (0..cols)
                        .map(|_| if extreme { random.unit().signum() } else { random.normal() })
                        .collect();
                    (scalar.quantise)(&x, encoding.activation_block().unwrap(), panels);
                }
                let index: Vec<u32> = (0..tokens as u32).rev().map(|t| t + 1).collect();
                let x = Rows::indexed(&panels, width, &index);
                let run = |kernels: &Kernels| {
                    let mut out = vec![f32::NAN; tokens * rows];
                    (kernels.matmul_q8)(w, x, &mut TileMut::new(&mut out, rows));
                    out
                };
                let what = format!("{encoding} [{rows}, {cols}] × {tokens}");
                assert_same_bits(&run(ours), &run(scalar), &what);
            }
        }
    });
}

#[test]
fn products_with_extreme_weights_have_the_scalar_bits() {
    each_isa(|ours, scalar| {
        for encoding in quantised() {
            for byte in [0x00, 0x7f, 0x80, 0xff] {
                let (rows, cols) = (18, 512);
                let codes = vec![byte; encoding.plane_bytes(rows, cols).unwrap()[0]];
                let stored = Stored::with_codes(&mut Random(2), encoding, rows, cols, codes);
                let w = stored.view();
                for sign in [1.0, -1.0] {
                    let mut panels = vec![Q8Panel::default(); 3 * 2];
                    for panels in panels.chunks_exact_mut(2) {
                        (scalar.quantise)(&vec![sign; cols], encoding.activation_block().unwrap(), panels);
                    }
                    for tokens in [1, 3] {
                        let run = |kernels: &Kernels| {
                            let mut out = vec![f32::NAN; tokens * rows];
                            let x = Rows::new(&panels[..2 * tokens], 2);
                            (kernels.matmul_q8)(w, x, &mut TileMut::new(&mut out, rows));
                            out
                        };
                        let what = format!("{encoding}, bytes {byte:#x}, {tokens} tokens");
                        assert_same_bits(&run(ours), &run(scalar), &what);
                    }
                }
            }
        }
    });
}

#[test]
fn products_with_f32_activations_have_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(3);
        for encoding in encodings() {
            for &(rows, blocks, tokens) in SHAPES {
                let ragged = if block_len(encoding) == 1 { 16 * blocks * 7 + blocks } else { blocks };
                let cols = ragged * block_len(encoding);
                let stored = Stored::random(&mut random, encoding, rows, cols);
                let w = stored.view();
                let x = random.normals(tokens * cols);
                let run = |kernels: &Kernels| {
                    let mut out = vec![f32::NAN; tokens * rows];
                    (kernels.matmul_f32)(w, Rows::new(&x, cols), &mut TileMut::new(&mut out, rows));
                    out
                };
                let what = format!("{encoding} [{rows}, {cols}] × {tokens}");
                assert_same_bits(&run(ours), &run(scalar), &what);
            }
        }
    });
}

#[test]
fn products_with_transposed_matrices_have_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(8);
        for encoding in encodings() {
            for (rows, blocks, tokens) in [(1, 1, 1), (17, 3, 1), (16, 9, 3)] {
                let cols = blocks * block_len(encoding).max(33).next_multiple_of(block_len(encoding));
                let stored = Stored::random(&mut random, encoding, rows, cols);
                let x = random.normals(tokens * rows);
                let run = |kernels: &Kernels| {
                    let mut out = vec![f32::NAN; tokens * cols];
                    let mut tile = TileMut::new(&mut out, cols);
                    (kernels.matmul_transposed)(stored.view(), Rows::new(&x, rows), &mut tile);
                    out
                };
                assert_same_bits(&run(ours), &run(scalar), &format!("{encoding} [{rows}, {cols}]"));
            }
        }
    });
}

#[test]
fn sums_that_are_negative_zeros_have_the_scalar_bits() {
    // Products below the smallest float: their signs survive, also in lanes beyond the last columns.
    let (rows, cols) = (5, 37);
    let weights: Vec<u8> = (0..rows * cols).flat_map(|_| 1e-30f32.to_le_bytes()).collect();
    let x = vec![-1e-30; 3 * cols];
    each_isa(|ours, _| {
        for encoding in [Encoding::Blocks(DType::F32), Encoding::Columns(DType::F32)] {
            let planes = Planes { codes: &weights, ..Planes::default() };
            let w = MatRef::from_planes(encoding, rows, cols, planes);
            for tokens in [1, 3] {
                let mut out = vec![f32::NAN; tokens * rows];
                let x = Rows::new(&x[..tokens * cols], cols);
                (ours.matmul_f32)(w, x, &mut TileMut::new(&mut out, rows));
                assert_same_bits(&out, &vec![-0.0; out.len()], &format!("{encoding}, {tokens} tokens"));
            }
        }
    });
}

#[test]
fn mxfp4_with_any_exponent_has_the_scalar_bits() {
    let (rows, cols) = (256, 96);
    each_isa(|ours, scalar| {
        let mut random = Random(9);
        let mut stored = Stored::random(&mut random, Encoding::Mxfp4, rows, cols);
        // One row per exponent, in one of its groups. The other groups are zero, so that the smallest exponent matters.
        for row in 0..rows {
            stored.scales[3 * row + row % 3] = row as u8;
            for (group, codes) in stored.codes[48 * row..][..48].chunks_exact_mut(16).enumerate() {
                if group != row % 3 {
                    codes.fill(0);
                }
            }
        }
        for tokens in [1, 3] {
            let mut panels = vec![Q8Panel::default(); tokens];
            for panel in panels.chunks_exact_mut(1) {
                (scalar.quantise)(&random.normals(cols), 32, panel);
            }
            let run = |kernels: &Kernels| {
                let mut out = vec![f32::NAN; tokens * rows];
                (kernels.matmul_q8)(stored.view(), Rows::new(&panels, 1), &mut TileMut::new(&mut out, rows));
                out
            };
            let ours = run(ours);
            assert!(ours[0] != 0.0 && ours[1] != 0.0, "the smallest exponents vanish");
            // The largest exponents give infinite sums; the middle ones do not.
            assert!(ours.chunks_exact(rows).all(|row| row[..200].iter().all(|sum| sum.is_finite())));
            assert_same_bits_or_nan(&ours, &run(scalar), &format!("{tokens} tokens"));
        }
    });
}

#[test]
fn fp8_with_any_code_and_any_scale_has_the_scalar_bits() {
    let (rows, cols) = (6, 256);
    let encoding = Encoding::Tiles(Tiles { rows: 1, cols: 32, scales: DType::F32 });
    let scales = [0.0, 1e-40, -1e-30, 3.0, 2f32.powi(119), 2f32.powi(120), f32::INFINITY, f32::NAN];
    each_isa(|ours, scalar| {
        let mut random = Random(8);
        // One code of either sign is NaN: in one row, or in none.
        for not_a_number in [None, Some(0x7f), Some(0xff)] {
            for scale in scales {
                let mut stored = Stored::random(&mut random, encoding, rows, cols);
                stored.codes[..255]
                    .copy_from_slice(&Vec::from_iter((0..255).map(|b| b - u8::from(b == 127))));
                if let Some(code) = not_a_number {
                    stored.codes[2 * cols + 77] = code;
                }
                stored.scales[4 * 11..][..4].copy_from_slice(&scale.to_le_bytes());
                for tokens in [1, 3] {
                    let x = random.normals(tokens * cols);
                    let run = |kernels: &Kernels| {
                        let mut out = vec![0.0; tokens * rows];
                        let x = Rows::new(&x, cols);
                        (kernels.matmul_f32)(stored.view(), x, &mut TileMut::new(&mut out, rows));
                        out
                    };
                    let ours = run(ours);
                    let what = format!("{not_a_number:?}, scale {scale}, {tokens} tokens");
                    assert_same_bits_or_nan(&ours, &run(scalar), &what);
                    let hidden = ours.iter().skip(2).step_by(rows).any(|v| !v.is_nan());
                    assert!(not_a_number.is_none() || !hidden, "{what}: a NaN is hidden");
                }
            }
        }
    });
}

#[test]
fn products_with_some_of_the_rows_have_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(7);
        for encoding in encodings() {
            let (rows, cols) = (37, 2 * block_len(encoding).max(33));
            let cols = cols.next_multiple_of(block_len(encoding));
            let stored = Stored::random(&mut random, encoding, rows, cols);
            let x = random.normals(3 * cols);
            let mut panels = vec![Q8Panel::default(); 3 * Q8Panel::count(cols)];
            if let Some(block) = encoding.activation_block() {
                for (x, panels) in x.chunks(cols).zip(panels.chunks_mut(Q8Panel::count(cols))) {
                    (scalar.quantise)(x, block, panels);
                }
            }
            let run = |kernels: &Kernels, w: MatRef<'_>| {
                let mut out = vec![f32::NAN; 3 * w.rows];
                let mut tile = TileMut::new(&mut out, w.rows);
                match encoding.activation_block() {
                    Some(_) => (kernels.matmul_q8)(w, Rows::new(&panels, Q8Panel::count(cols)), &mut tile),
                    None => (kernels.matmul_f32)(w, Rows::new(&x, cols), &mut tile),
                }
                out
            };
            let whole = run(scalar, stored.view());
            // Every third of rows 4 to 29, starting with the second: 5, 8, … 29.
            let some = stored.view().rows(4..30).every(1, 3);
            assert_eq!(some.rows, 9);
            let picked: Vec<f32> = (0..3)
                .flat_map(|t| (5..30).step_by(3).map(move |r| t * rows + r))
                .map(|i| whole[i])
                .collect();
            assert_same_bits(&run(scalar, some), &picked, &format!("{encoding}, scalar"));
            assert_same_bits(&run(ours, some), &picked, &format!("{encoding}"));
        }
    });
}

#[test]
fn quantised_activations_are_the_scalar_ones() {
    const NOT_A_NUMBER: usize = 3;
    each_isa(|ours, scalar| {
        let mut random = Random(4);
        for block in [32, 64, 128, 256] {
            for len in [32, 256, 288, 1024, 2048] {
                for kind in 0..=NOT_A_NUMBER {
                    let mut x = random.normals(len);
                    match kind {
                        0 => {}
                        1 => x.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 2.0),
                        2 => x.iter_mut().for_each(|x| *x = 0.0),
                        NOT_A_NUMBER => x[len / 2] = f32::NAN,
                        _ => unreachable!(),
                    }
                    let run = |kernels: &Kernels| {
                        let mut panels = vec![Q8Panel::default(); Q8Panel::count(len)];
                        (kernels.quantise)(&x, block, &mut panels);
                        panels
                    };
                    let (ours, scalar) = (run(ours), run(scalar));
                    assert_eq!(ours.len(), scalar.len());
                    for (a, b) in ours.iter().zip(&scalar) {
                        assert!(a.lanes == b.lanes && a.sums == b.sums, "block {block}, length {len}");
                        assert_same_bits_or_nan(&a.scales, &b.scales, "scales");
                        assert!(kind == NOT_A_NUMBER || a.scales.iter().all(|scale| scale.is_finite()));
                    }
                }
            }
        }
    });
}

#[test]
fn attention_has_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(5);
        // Includes heads that end inside the registers of some or all sets, and more heads than are processed together.
        let shapes = [
            (1, 32, 32),
            (2, 128, 128),
            (3, 64, 48),
            (8, 128, 128),
            (5, 24, 40),
            (2, 20, 36),
            (3, 30, 30),
            (7, 576, 512),
            (70, 32, 32),
        ];
        for (heads, head_dim, value_dim) in shapes {
            for count in [1, 2, 15, 16, 17, 63, KEY_BLOCK] {
                let queries = random.normals(heads * head_dim);
                let keys = random.normals(count * head_dim);
                let values = random.normals(count * value_dim);
                let half = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
                let (keys16, values16) = (half(&keys), half(&values));
                // Separate values, or the last channels of the keys.
                let inside = head_dim.saturating_sub(value_dim);
                let caches = [
                    (KvRef::F32(&keys), KvRef::F32(&values), value_dim),
                    (KvRef::F16(&keys16), KvRef::F16(&values16), value_dim),
                    (KvRef::F32(&keys), KvRef::F32(&keys[inside..]), head_dim),
                    (KvRef::F16(&keys16), KvRef::F16(&keys16[inside..]), head_dim),
                ];
                for (keys, values, value_stride) in caches {
                    if value_dim > value_stride {
                        continue;
                    }
                    let scale = 0.1;
                    let queries = &queries;
                    let step =
                        AttentionStep { queries, keys, values, head_dim, value_dim, value_stride, scale };
                    let run = |kernels: &Kernels| {
                        let mut running = vec![RunningSoftmax::START; heads];
                        let mut out = vec![0.0; heads * value_dim];
                        (kernels.attend)(&step, &mut running, &mut out);
                        // A second step with another maximum corrects the sums of the first.
                        let again = AttentionStep { scale: 0.3, ..step };
                        (kernels.attend)(&again, &mut running, &mut out);
                        (kernels.attend_finish)(&running, &mut out);
                        out.extend(running.iter().flat_map(|running| [running.max, running.sum]));
                        out
                    };
                    let what = format!(
                        "{heads} heads of {head_dim}, {count} keys, {value_stride} from value to value"
                    );
                    assert_same_bits(&run(ours), &run(scalar), &what);
                }
            }
        }
    });
}

#[test]
fn attention_with_scores_that_are_not_finite_has_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(9);
        const DIM: usize = 32;
        for count in [1, 7, 16, 21] {
            for wrong in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                for every in [1, 3] {
                    let queries: Vec<f32> = random.normals(2 * DIM).into_iter().map(f32::abs).collect();
                    let values = random.normals(count * DIM);
                    let mut keys = random.normals(count * DIM);
                    keys.chunks_mut(DIM).step_by(every).for_each(|key| key[5] = wrong);
                    let step = AttentionStep {
                        queries: &queries,
                        keys: KvRef::F32(&keys),
                        values: KvRef::F32(&values),
                        head_dim: DIM,
                        value_dim: DIM,
                        value_stride: DIM,
                        scale: 0.1,
                    };
                    let run = |kernels: &Kernels| {
                        let mut running = [RunningSoftmax::START; 2];
                        let mut out = vec![0.0; 2 * DIM];
                        (kernels.attend)(&step, &mut running, &mut out);
                        out.extend(running.iter().flat_map(|running| [running.max, running.sum]));
                        out
                    };
                    let what = format!("{wrong} in one of {every} of {count} keys");
                    assert_same_bits_or_nan(&run(ours), &run(scalar), &what);
                }
            }
        }
    });
}

const ACTIVATIONS: [Activation; 7] = [
    Activation::SwiGlu,
    Activation::Clamped { alpha: 1.702, limit: 0.5 },
    Activation::ClippedBefore(0.5),
    Activation::ClippedAfter(0.3),
    Activation::GeGlu,
    Activation::ReGlu,
    Activation::ReluSquared,
];

#[test]
fn everything_element_by_element_has_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(6);
        for len in [1, 15, 16, 17, 64, 100, 768, 2048] {
            let (x, y) = (random.normals(len), random.normals(len));
            let check = |what: &str, run: &dyn Fn(&Kernels, &mut [f32])| {
                let (mut a, mut b) = (x.clone(), x.clone());
                run(ours, &mut a);
                run(scalar, &mut b);
                assert_same_bits(&a, &b, &format!("{what}, length {len}"));
            };
            check("rms_norm", &|k, v| (k.rms_norm)(v, &y, 1e-6));
            check("softmax", &|k, v| (k.softmax)(v));
            check("layer_norm", &|k, v| (k.layer_norm)(v, &y, 1e-6));
            for activation in ACTIVATIONS {
                let up = if activation.is_gated() { &y[..] } else { &[] };
                check("activate", &|k, v| (k.activate)(v, up, activation));
            }
            for gate in [Gate::Sigmoid, Gate::Softplus, Gate::Factor] {
                check("gate", &|k, v| (k.gate)(v, &y, gate));
                check("one gate", &|k, v| (k.gate)(v, &y[..1], gate));
            }
            check("softcap", &|k, v| (k.softcap)(v, 0.7));
            check("l2_norm", &|k, v| (k.l2_norm)(v, 1e-6, 0.37));
            check("convolve", &|k, v| (k.convolve)(&[Tap { w: &x, x: &y }, Tap { w: &y, x: &y }], v));
            check("activate_silu", &|k, v| (k.activate_silu)(v));
            check("delta_gates", &|k, v| {
                let mut b = y.clone();
                (k.delta_gates)(v, &mut b, &y, &x);
                v.iter_mut().zip(b).for_each(|(v, b)| *v += b);
            });
            check("add", &|k, v| (k.add)(v, &y));
            check("add_scaled", &|k, v| (k.add_scaled)(v, 0.37, &y));
            for pairs in [RopePairs::HalfSplit, RopePairs::Interleaved] {
                for rotated in [len / 2 * 2, len / 4 * 2] {
                    let (cos, sin) = (&y[..rotated / 2], &x[..rotated / 2]);
                    check("rope", &|k, v| (k.rope)(v, len, pairs, cos, sin));
                }
            }
        }
    });
}

#[test]
fn the_delta_rule_has_the_scalar_bits() {
    each_isa(|ours, scalar| {
        let mut random = Random(8);
        for key_dim in [1, 2, 7, 16, 128] {
            let (q, k) = (random.normals(key_dim), random.normals(key_dim));
            let v: [f32; STATE_COLUMNS] = random.normals(STATE_COLUMNS).try_into().unwrap();
            let step = DeltaStep { q: &q, k: &k, v: &v, keep: 0.9, correct: 0.4 };
            let before = random.normals(key_dim * STATE_COLUMNS);
            let run = |kernels: &Kernels| {
                let mut state = vec![f32::NAN; before.len()];
                let mut out = [f32::NAN; STATE_COLUMNS];
                (kernels.delta_step)(&step, Some(&before), &mut state, &mut out);
                (kernels.delta_step)(&step, None, &mut state, &mut out);
                state.extend(out);
                state
            };
            assert_same_bits(&run(ours), &run(scalar), &format!("{key_dim} rows"));
        }
    });
}
