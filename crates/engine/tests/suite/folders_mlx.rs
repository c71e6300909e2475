//! Folders as mlx-lm stores the families: the same weights under other names and in other shapes.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_engine::Precision;
use forebay_testing::assert_same_bits;

use crate::common::folder_builder::{Folder, Tensor};
use crate::common::models::{containers, logits, options, random_tokens};

#[test]
fn lfm2_moe() {
    let mut folder = Folder::read(&containers("lfm2_moe")[1]);
    stack_experts(&mut folder, "feed_forward", ["w1", "w3", "w2"]);
    folder.rename(|name| {
        let plain = name.replace("w1.weight", "gate_proj.weight").replace("w2.weight", "down_proj.weight");
        plain.replace("w3.weight", "up_proj.weight")
    });
    for filters in folder.tensors.iter_mut().filter(|t| t.name.ends_with("conv.conv.weight")) {
        // Channels, inputs, kernel.
        filters.shape.swap(1, 2);
    }
    assert_bits_of_the_folder(&folder, "lfm2_moe");
}

#[test]
fn granitemoe() {
    let mut folder = Folder::read(&containers("granitemoe")[1]);
    let names: Vec<_> = folder.tensors.iter().map(|t| t.name.clone()).collect();
    for name in names.iter().filter(|name| name.ends_with("block_sparse_moe.input_linear.weight")) {
        let both = folder.take(name);
        let [experts, rows, cols] = both.shape[..] else { panic!("{:?}", both.shape) };
        let matrices: Vec<_> = both.data.chunks_exact(both.data.len() / experts / 2).collect();
        for (part, first) in [("gate", 0), ("up", 1)] {
            let data = matrices.iter().skip(first).step_by(2).copied().flatten().copied().collect();
            let name = name.replace("input_linear", &format!("switch_mlp.{part}_proj"));
            folder.add(name, &both.dtype, &[experts, rows / 2, cols], data);
        }
    }
    folder.rename(|name| name.replace("moe.output_linear", "moe.switch_mlp.down_proj"));
    assert_bits_of_the_folder(&folder, "granitemoe");
}

#[test]
fn bailingmoe_of_both_versions() {
    for family in ["bailingmoe", "bailingmoe2"] {
        let mut folder = Folder::read(&containers(family)[1]);
        stack_experts(&mut folder, "mlp", ["gate_proj", "up_proj", "down_proj"]);
        folder.rename(|name| name.replace("mlp.gate.weight", "mlp.gate.gate_proj.weight"));
        // mlx-lm has already done what this setting asks for.
        folder.config.insert("norm_head".to_owned(), true.into());
        assert_bits_of_the_folder(&folder, family);
    }
}

#[test]
fn families_whose_experts_are_only_stacked() {
    for family in ["hunyuan_v1_moe", "solar_open", "exaone_moe", "afmoe"] {
        let mut folder = Folder::read(&containers(family)[1]);
        stack_experts(&mut folder, "mlp", ["gate_proj", "up_proj", "down_proj"]);
        folder.rename(|name| match family {
            "exaone_moe" => name.replace("mlp.e_score", "mlp.gate.e_score"),
            "afmoe" => name.replace("mlp.switch_mlp", "mlp.experts"),
            _ => name.to_owned(),
        });
        assert_bits_of_the_folder(&folder, family);
    }
}

/// The experts are stacked in both kinds of folders, and MLX's norms are not zero-centred.
#[test]
fn step3p5() {
    let mut folder = Folder::read(&containers("step3p5")[1]);
    folder.rename(|name| {
        let router =
            name.replace(".moe.gate.", ".mlp.gate.gate.").replace(".moe.router_", ".mlp.gate.router_");
        router.replace(".moe.", ".mlp.switch_mlp.").replace(".share_expert.", ".mlp.share_expert.")
    });
    for norm in folder.tensors.iter_mut().filter(|t| t.name.ends_with("norm.weight")) {
        let weights =
            norm.data.chunks_exact(2).map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])));
        norm.data = weights.flat_map(|weight| (weight + 1.0).to_le_bytes()).collect();
        norm.dtype = "F32".to_owned();
    }
    assert_bits_of_the_folder(&folder, "step3p5");
}

#[test]
fn mimo_v2_flash() {
    let mut folder = Folder::read(&containers("mimo_v2_flash")[1]);
    stack_experts(&mut folder, "mlp", ["gate_proj", "up_proj", "down_proj"]);
    assert_bits_of_the_folder(&folder, "mimo_v2_flash");
}

#[test]
fn laguna() {
    let mut folder = Folder::read(&containers("laguna")[1]);
    stack_experts(&mut folder, "mlp", ["gate_proj", "up_proj", "down_proj"]);
    folder.rename(|name| {
        name.replace("mlp.gate.weight", "mlp.gate.proj.weight")
            .replace("mlp.experts.e_score", "mlp.gate.e_score")
    });
    assert_bits_of_the_folder(&folder, "laguna");
}

#[test]
fn llama4() {
    let mut folder = Folder::read(&containers("llama4")[1]);
    let both = folder.tensors.iter().filter_map(|t| t.name.strip_suffix(".gate_up_proj"));
    for module in both.map(str::to_owned).collect::<Vec<_>>() {
        let both = transposed(folder.take(&format!("{module}.gate_up_proj")));
        let half = both.data.len() / both.shape[0] / 2;
        let [experts, rows, columns] = both.shape[..] else { panic!("{:?}", both.shape) };
        for (part, first) in [("gate", 0), ("up", 1)] {
            let data = both.data.chunks_exact(half).skip(first).step_by(2).flatten().copied().collect();
            folder.add(format!("{module}.{part}_proj.weight"), "BF16", &[experts, rows / 2, columns], data);
        }
        let down = transposed(folder.take(&format!("{module}.down_proj")));
        folder.add(format!("{module}.down_proj.weight"), "BF16", &down.shape, down.data);
    }
    assert_bits_of_the_folder(&folder, "llama4");
}

/// A tensor of matrices in BF16, each transposed.
fn transposed(tensor: Tensor) -> Tensor {
    let [count, rows, columns] = tensor.shape[..] else { panic!("{:?}", tensor.shape) };
    let at = |matrix: usize, i: usize| 2 * ((matrix * rows + i % rows) * columns + i / rows);
    let places = (0..count).flat_map(|matrix| (0..rows * columns).map(move |i| at(matrix, i)));
    let data = places.flat_map(|at| &tensor.data[at..at + 2]).copied().collect();
    Tensor { data, shape: vec![count, columns, rows], ..tensor }
}

/// Replaces the tensors of single experts, which have these names of gate, up and down, by one tensor for each of them.
fn stack_experts(folder: &mut Folder, module: &str, parts: [&str; 3]) {
    let mut stacks = BTreeMap::new();
    for (part, ours) in parts.into_iter().zip(["gate", "up", "down"]) {
        for expert in 0.. {
            let end = format!(".{module}.experts.{expert}.{part}.weight");
            let layers: Vec<_> =
                folder.tensors.iter().filter_map(|t| t.name.strip_suffix(&end)).map(str::to_owned).collect();
            if layers.is_empty() {
                break;
            }
            for layer in layers {
                let tensor = folder.take(&format!("{layer}{end}"));
                let name = format!("{layer}.{module}.switch_mlp.{ours}_proj.weight");
                let (dtype, shape, data) =
                    stacks.entry(name).or_insert_with(|| (tensor.dtype, vec![0], Vec::new()));
                shape.splice(1.., tensor.shape);
                shape[0] += 1;
                data.extend(tensor.data);
                assert_eq!(*dtype, "BF16");
            }
        }
    }
    for (name, (dtype, shape, data)) in stacks {
        folder.add(name, &dtype, &shape, data);
    }
}

fn assert_bits_of_the_folder(folder: &Folder, family: &str) {
    let temporary = tempfile::tempdir().unwrap();
    folder.write_as_mlx(temporary.path());
    let tokens = random_tokens(24, 512, 3);
    let run = |path: &Path| logits(path, &options(Precision::Exact), &tokens);
    assert_same_bits(&run(temporary.path()), &run(&containers(family)[1]), family);
}
