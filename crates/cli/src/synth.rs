//! `forebay synth`: models of any size, to measure with.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use forebay_engine::internals::format::DType;
use forebay_engine::internals::synth::{
    Change, FAMILIES, FEWEST_TOKENS, Order, Shape, Synthesis, TypeChoice,
};
use forebay_engine::{Bytes, Cancel, Error};
use serde_json::json;

use crate::output::{Output, print};
use crate::progress::Progress;
use crate::{errors, interrupt};

/// Write a model with random weights, to measure speed and memory
///
/// The file has the sizes and weight types of a real model and uses its experts unevenly, as real models do. It runs at the
/// speed of a real model, and its text is noise. Each family has the shape of one real model, except for a vocabulary of
/// 32000 tokens; flags change the shape. --dry-run shows the size of the file. The same flags and seed give the same bytes
/// on every machine.
#[derive(Args)]
#[command(after_help = after_help(), after_long_help = after_long_help())]
pub struct SynthArgs {
    /// File to write
    out: PathBuf,
    /// Model family (listed below)
    #[arg(long, value_name = "NAME", default_value = FAMILIES[0].name, hide_possible_values = true,
        value_parser = PossibleValuesParser::new(FAMILIES.iter().map(|family| family.name)))]
    family: String,
    /// How unevenly experts are used, from 0 (evenly) to 4
    #[arg(long, value_name = "X", default_value_t = 0.4, value_parser = skew)]
    skew: f32,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Show what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    shape: ShapeArgs,
    #[command(flatten)]
    types: TypeArgs,
}

/// What changes a family's shape.
#[derive(Args)]
#[command(next_help_heading = "Shape (by default, as in the family's model)")]
struct ShapeArgs {
    /// Number of layers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=256))]
    layers: Option<u64>,
    /// Hidden size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    hidden: Option<u64>,
    /// Intermediate size of an expert, or of the feed-forward blocks of dense families
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    inter: Option<u64>,
    /// Experts per layer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    experts: Option<u64>,
    /// Experts used per token
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    top_k: Option<u64>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65536))]
    heads: Option<u64>,
    /// Key-value heads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65536))]
    kv_heads: Option<u64>,
    /// Size of a head
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65536))]
    head_dim: Option<u64>,
    /// Maximum context length in tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    ctx: Option<u64>,
    /// Vocabulary size [default: 32000]
    #[arg(long, value_name = "N", default_value_t = 32_000, hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(FEWEST_TOKENS..=1 << 20))]
    vocab: u64,
    /// Any other GGUF metadata key of the family (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Change>,
}

/// What changes the types of matrices.
#[derive(Args)]
#[command(next_help_heading = "Weight types (rows that a type does not divide get the next larger type)")]
struct TypeArgs {
    /// All matrices [default: Q4_K, with Q6_K for down projections, values and output; gpt-oss: MXFP4 with Q8_0]
    #[arg(long = "type", value_name = "TYPE", value_parser = dtype)]
    all: Option<DType>,
    /// Gate and up projections of routed experts
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    expert_type: Option<DType>,
    /// Down projections
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    down_type: Option<DType>,
    /// Output matrix and value projections
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    output_type: Option<DType>,
}

fn after_help() -> String {
    let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
    format!("Families: {}\n\n{EXAMPLES}", names.join(", "))
}

fn after_long_help() -> String {
    let list: String =
        FAMILIES.iter().map(|family| format!("  {:<11} {}\n", family.name, family.model)).collect();
    format!("Families, and the model whose shape they have:\n{list}\n{EXAMPLES}")
}

const EXAMPLES: &str = "\
Examples:
  forebay synth big.gguf                        18 GiB, the shape of Qwen3-30B-A3B
  forebay synth big.gguf --layers 12            a quarter of the layers
  forebay synth q8.gguf --type Q8_0 --dry-run   show the size
  forebay synth oss.gguf --family gpt-oss --layers 36 --experts 128
  forebay plan big.gguf --memory 6G && forebay bench big.gguf --memory 6G";

/// Runs the command.
pub fn run(args: &SynthArgs) -> Result<ExitCode> {
    let synthesis = match Synthesis::new(&args.out, &args.order()?) {
        Err(error @ Error::Invalid(_)) => return Err(errors::usage(error)),
        other => other?,
    };
    for (wanted, got) in &synthesis.fallbacks {
        eprintln!(
            "note: {got} replaces {wanted} in matrices whose rows are not a whole number of {wanted} blocks"
        );
    }
    let seconds = if args.dry_run { None } else { Some(args.write(&synthesis)?) };
    print(&if args.json { args.json(&synthesis, seconds) } else { args.text(&synthesis, seconds) })?;
    Ok(ExitCode::SUCCESS)
}

impl SynthArgs {
    fn order(&self) -> Result<Order> {
        let family = FAMILIES.iter().find(|family| family.name == self.family);
        let shape = &self.shape;
        Ok(Order {
            family: family.with_context(|| format!("there is no family {}", self.family))?,
            shape: Shape {
                layers: shape.layers,
                hidden: shape.hidden,
                inter: shape.inter,
                experts: shape.experts,
                top_k: shape.top_k,
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                ctx: shape.ctx,
            },
            changes: shape.set.clone(),
            types: TypeChoice {
                all: self.types.all,
                experts: self.types.expert_type,
                down: self.types.down_type,
                output: self.types.output_type,
            },
            vocabulary: shape.vocab,
            skew: self.skew,
            seed: self.seed,
        })
    }

    /// Writes the file; gives the seconds that it took.
    fn write(&self, synthesis: &Synthesis) -> Result<f64> {
        if !self.force && self.out.is_file() {
            bail!("{} exists; --force replaces it", self.out.display());
        }
        let bytes = synthesis.bytes();
        Output::require_space(&self.out, bytes)
            .map_err(|error| anyhow!("{error}, or write a smaller model (--layers, --type)"))?;
        let cancel = Cancel::default();
        interrupt::install(&cancel)?;
        let started = Instant::now();
        let bar = Progress::producing(bytes);
        let mut progress = |done| bar.set(done, bytes);
        Output::create(&self.out)?
            .finish_with(|file| Ok(synthesis.write(file, &cancel, &mut progress)?))?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn json(&self, synthesis: &Synthesis, seconds: Option<f64>) -> String {
        let object = json!({
            "file": self.out.display().to_string(),
            "family": self.family,
            "written": seconds.is_some(),
            "bytes": synthesis.bytes(),
            "expert_bytes": synthesis.expert_bytes,
            "tensors": synthesis.tensors(),
            "parameters": synthesis.parameters(),
            "seconds": seconds,
        });
        format!("{object:#}\n")
    }

    fn text(&self, synthesis: &Synthesis, seconds: Option<f64>) -> String {
        let bytes = synthesis.bytes();
        let end = match seconds {
            Some(seconds) => format!("{seconds:.1} s, {:.2} GB/s", bytes as f64 / 1e9 / seconds.max(1e-9)),
            None => "nothing written".to_owned(),
        };
        format!(
            "{}: {} ({} of experts) · {:.2} billion parameters in {} tensors · {end}\n",
            self.out.display(),
            Bytes(bytes),
            Bytes(synthesis.expert_bytes),
            synthesis.parameters() as f64 / 1e9,
            synthesis.tensors()
        )
    }
}

/// Reads a type for clap.
fn dtype(s: &str) -> Result<DType> {
    DType::computable().find(|dtype| dtype.name().eq_ignore_ascii_case(s)).ok_or_else(|| {
        let known: Vec<_> = DType::computable().map(DType::name).collect();
        anyhow!("expected one of {}", known.join(", "))
    })
}

fn skew(s: &str) -> Result<f32> {
    match s.parse() {
        Ok(skew) if (0.0..=4.0).contains(&skew) => Ok(skew),
        _ => Err(anyhow!("expected a number from 0 to 4")),
    }
}
