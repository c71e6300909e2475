//! The plan for a device with its own memory, and its refusals, without such a device.

use std::path::Path;
use std::sync::Arc;

use forebay_engine::internals::backend::{BufShape, KvShape};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::plan::{ExpertMemory, Plan};
use forebay_engine::{Error, Options, Precision, Prospect, Result};
use forebay_kernels::{DType, Encoding};

use crate::common::gguf_builder::{GgufBuilder, tensor_type};
use crate::common::models::{data, demo_model};
use crate::common::tiny_model::{EXPERTS, HEAD_DIM, HEADS, INNER, tiny_model};

/// A device that is only planned with. It computes all types, or all but one, and heads of up to this many channels.
struct Planned {
    memory: u64,
    without: Option<Encoding>,
    channels: usize,
    shares_memory: bool,
}

impl Planned {
    fn new(memory: u64) -> Planned {
        Planned { memory, without: None, channels: usize::MAX, shares_memory: false }
    }
}

impl Device for Planned {
    fn executor(&self, _: Precision, _: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        Err(Error::Backend("it is only planned with".into()))
    }

    fn computes(&self, encoding: Encoding) -> bool {
        Some(encoding) != self.without
    }

    fn attends(&self, shape: &KvShape) -> bool {
        shape.value_dim <= self.channels
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    fn memory(&self) -> u64 {
        self.memory
    }

    fn chunk(&self) -> usize {
        2048
    }

    fn memory_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn link_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn pin(&self, _: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(()))
    }
}

fn plan(model: &Path, vram: u64, options: &Options) -> Result<Plan> {
    let device: Arc<dyn Device> = Arc::new(Planned::new(vram));
    Prospect::new(model, &options.clone().device(Some(device))).map(|p| p.plan().clone())
}

#[test]
fn experts_are_placed_where_they_fit() {
    // Shorter chunks would leave more memory.
    let (model, options) = (demo_model(), Options::default().context(256).chunk(32));
    let whole = plan(&model, 64 << 30, &options).unwrap();
    let there = whole.device.clone().unwrap();
    assert!(whole.device_holds_all_experts() && !whole.streams() && !whole.moves_experts());
    assert_eq!(there.slot_count(), whole.expert_count);
    assert_eq!(there.room(), there.budget - there.total() + there.kv);

    // One byte less than everything needs.
    let less = plan(&model, there.total() - 1, &options).unwrap();
    let on_device = less.device.as_ref().unwrap();
    assert!(on_device.slot_count() < less.expert_count && on_device.total() < there.total());
    // The rest is in RAM.
    assert!(less.holds_all_experts() && !less.streams() && less.moves_experts());

    let both = options.clone().expert_memory(ExpertMemory::Percent(30.0));
    let both = plan(&model, there.total() - 1, &both).unwrap();
    assert!(both.streams() && both.slot_bytes <= both.experts * 3 / 10);
}

#[test]
fn a_device_that_shares_memory_has_the_cpus_plan() {
    let device: Arc<dyn Device> = Arc::new(Planned { shares_memory: true, ..Planned::new(1) });
    // One description, so that all plans are for the same machine.
    let model = Prospect::new(&demo_model(), &Options::default()).unwrap();
    let plan = |options: &Options| model.plan_with(options).unwrap();
    let asked = Options::default().context(256).chunk(32).memory(1 << 30);
    let (there, here) = (plan(&asked.clone().device(Some(Arc::clone(&device)))), plan(&asked));
    assert!(there.device.is_none() && there.holds_all_experts() && there.kv > 0);
    assert_eq!((there.kv, there.scratch, there.slot_bytes), (here.kv, here.scratch, here.slot_bytes));

    // The number of tokens that are computed together may change bits, and a budget may not.
    let on_device = Options::default().device(Some(device));
    let least = model.least_memory(&on_device).unwrap();
    let chunk = |options: &Options, memory: u64| plan(&options.clone().memory(memory)).chunk;
    assert_eq!(chunk(&on_device, least), chunk(&on_device, 64 << 30).min(1024));
    let on_cpu = Options::default();
    assert_ne!(chunk(&on_cpu, least), chunk(&on_cpu, 64 << 30), "the CPU's chunks are the budget's choice");
}

#[test]
fn the_budget_does_not_change_the_chunk_size() {
    let model = demo_model();
    let whole = plan(&model, 64 << 30, &Options::default()).unwrap();
    let Err(Error::Budget { need, .. }) = plan(&model, 1 << 20, &Options::default()) else {
        panic!("a megabyte cannot hold it")
    };
    let least = plan(&model, need, &Options::default()).unwrap();
    assert_eq!(least.chunk, whole.chunk);
    let asked = Options::default().chunk(100);
    assert_eq!(plan(&model, need, &asked).unwrap().chunk, 100);
}

#[test]
fn a_device_below_the_minimum_is_refused_with_numbers() {
    let (model, options) = (demo_model(), Options::default().context(256).chunk(32));
    let Err(Error::Budget { need, have, what, remedy }) = plan(&model, 1 << 20, &options) else {
        panic!("a megabyte cannot hold it")
    };
    assert!(
        have == 1 << 20 && what.contains("dense weights") && remedy.contains("the device's memory limit"),
        "{what}: {remedy}"
    );
    let least = plan(&model, need, &options).unwrap();
    assert_eq!(least.device.unwrap().total(), need);
    assert!(plan(&model, need - 1, &options).is_err());
    // Too little RAM has its own message.
    let little = options.memory(1 << 20);
    let Err(Error::Budget { remedy, .. }) = plan(&model, need, &little) else { panic!("it needs more") };
    assert!(remedy.contains("Options::memory"), "{remedy}");
}

/// The device would ignore the scale, whatever the type of the weights.
#[test]
fn a_matrix_with_a_scale_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scaled.gguf");
    for name in ["blk.0.attn_q", "blk.1.ffn_up_exps"] {
        let count = if name.ends_with("exps") { 8 } else { 1 };
        let scales = [2.0f32; 8].map(f32::to_le_bytes).concat()[..4 * count].to_vec();
        let file = GgufBuilder::copy_of(&data("golden/qwen3moe.gguf"));
        let file = file.tensor_of(format!("{name}.scale"), tensor_type::F32, &[count as u64], scales);
        std::fs::write(&path, file.build()).unwrap();
        assert!(Prospect::new(&path, &Options::default()).is_ok());
        let Err(Error::Unsupported(message)) = plan(&path, 64 << 30, &Options::default()) else {
            panic!("the device was given {name}")
        };
        assert!(
            message.contains(&format!("{name}.weight")) && message.contains("Options::device = None"),
            "{message}"
        );
    }
}

#[test]
fn heads_that_are_too_large_for_the_device_are_refused() {
    let model = data("golden/qwen3moe.gguf");
    let open = |channels| {
        let device = Arc::new(Planned { channels, ..Planned::new(64 << 30) }) as Arc<dyn Device>;
        Prospect::new(&model, &Options::default().device(Some(device)))
    };
    let channels = (1..).find(|&channels| open(channels).is_ok()).expect("some number is enough");
    let Err(Error::Unsupported(message)) = open(channels - 1) else { panic!("they are too large") };
    for part in ["qwen3moe.gguf", &format!("values {channels}"), "Options::device = None"] {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

#[test]
fn a_type_that_the_device_does_not_compute_is_refused_by_name() {
    const HIDDEN: u64 = 256;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let dense = ("blk.1.attn_q.weight", &[HIDDEN, HEADS * HEAD_DIM][..]);
    let experts = ("blk.1.ffn_up_exps.weight", &[HIDDEN, INNER, EXPERTS][..]);
    // The rest of the model is F32.
    for dtype in DType::computable().filter(|&dtype| dtype != DType::F32) {
        let planned = Planned { without: Some(dtype.into()), ..Planned::new(1 << 40) };
        let device = Some(Arc::new(planned) as Arc<dyn Device>);
        let options = Options::default().device(device).threads(1);
        let id = (0..).find(|&id| DType::from_ggml(id) == Some(dtype)).expect("every type has an identifier");
        for (tensor, dims) in [dense, experts] {
            let weights: u64 = dims.iter().product();
            let bytes = weights as usize / dtype.block_len() * dtype.block_bytes();
            let file = tiny_model(HIDDEN).without_tensor(tensor).tensor(tensor, id, dims, bytes);
            std::fs::write(&path, file.build()).unwrap();
            match Prospect::new(&path, &options) {
                Err(Error::Unsupported(message)) => {
                    for part in ["model.gguf", tensor, dtype.name(), "Options::device = None"] {
                        assert!(message.contains(part), "no {part:?} in: {message}");
                    }
                }
                Ok(_) => panic!("{dtype} in {tensor} is taken"),
                Err(other) => panic!("{other:?}"),
            }
            // The CPU computes it.
            Prospect::new(&path, &Options::default()).unwrap();
        }
    }
}
