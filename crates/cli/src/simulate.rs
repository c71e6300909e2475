//! `forebay simulate`: replays recorded conversations against expert caches of several sizes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use forebay_engine::Bytes;
use forebay_engine::internals::experts::policy::{self, PolicyKind};
use forebay_engine::internals::forecast::simulate::{Hits, TierHits, Workload};
use forebay_engine::internals::forecast::trace::{Phase, RoutedLayer, Trace};
use serde_json::{Map, Value, json};

use crate::output::print;
use crate::progress::Progress;
use crate::values::at_least_one;

/// Compute cache hit rates of experts for recorded conversations
///
/// Replays traces against expert caches of several sizes and prints the cache hit rate of the generated tokens. There is a
/// column for each eviction policy and two for comparison, which know the whole trace in advance: "fixed" has the most used
/// experts in the cache from the start and never changes them; "belady" starts with an empty cache and evicts the expert
/// that is needed again last. No policy that starts with an empty cache has a higher hit rate than "belady".
///
/// Several traces of one model are replayed one after another into the same cache. Prompts fill free slots and are not
/// counted. A cache always has the slots that one layer needs at once.
///
/// With --vram, a second table shows GPU memory of the given sizes above each cache: the share of experts found in GPU
/// memory, in memory and on the drive.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay trace -p 'Tell me a story about a cat.' --out cat.trace
  forebay simulate cat.trace
  forebay simulate cat.trace dog.trace --slots 10,25
  forebay simulate cat.trace --vram 10,20 --slots 30
  forebay simulate cat.trace --json | jq '.budgets[].hit_rate.forecast'")]
pub struct SimulateArgs {
    /// Traces recorded by `forebay trace`
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Cache sizes, in per cent of all experts
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', default_value = "5,10,20,30,50", value_parser = percent)]
    slots: Vec<usize>,
    /// Sizes of GPU memory above the cache, in per cent of all experts
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', value_parser = percent)]
    vram: Vec<usize>,
    /// Print one JSON object: model, token counts, and the hit rates of each cache size
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &SimulateArgs) -> Result<ExitCode> {
    let played = Played::read(&args.traces)?;
    let bar = Progress::simulating(args.slots.len() * COLUMNS.len());
    let rows: Vec<Row> = args.slots.iter().map(|&percent| played.row(percent, &bar)).collect();
    drop(bar);
    let pairs = args.vram.iter().flat_map(|&vram| args.slots.iter().map(move |&slots| (vram, slots)));
    let tiers: Vec<TierRow> = pairs.map(|(vram, slots)| played.tiers(vram, slots)).collect();
    print(&if args.json {
        format!("{:#}\n", played.json(&rows, &tiers))
    } else {
        played.table(&rows) + &tier_table(&tiers)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The columns of the table.
#[derive(Clone, Copy)]
enum Column {
    Policy(PolicyKind),
    Fixed,
    Belady,
}

const COLUMNS: [Column; PolicyKind::ALL.len() + 2] = {
    let mut columns = [Column::Belady; PolicyKind::ALL.len() + 2];
    let mut i = 0;
    while i < PolicyKind::ALL.len() {
        columns[i] = Column::Policy(PolicyKind::ALL[i]);
        i += 1;
    }
    columns[i] = Column::Fixed;
    columns
};

impl Column {
    fn name(self) -> &'static str {
        match self {
            Column::Policy(kind) => kind.name(),
            Column::Fixed => "fixed",
            Column::Belady => "belady",
        }
    }

    fn play(self, workload: &Workload, slots: usize) -> Hits {
        match self {
            Column::Policy(kind) => workload.play(slots, &mut *policy::make(kind, workload.experts())),
            Column::Fixed => workload.best_fixed_set(slots),
            Column::Belady => workload.belady(slots),
        }
    }
}

/// One cache size, and the hits of each column.
struct Row {
    percent: usize,
    slots: usize,
    rates: [f64; COLUMNS.len()],
}

/// The sizes of two tiers, and the hits of the default policy.
struct TierRow {
    vram: usize,
    percent: usize,
    hits: TierHits,
    /// The hits of the best fixed set in the upper tier alone.
    fixed: f64,
}

impl TierRow {
    fn share(&self, hits: usize) -> f64 {
        hits as f64 / self.hits.asked.max(1) as f64
    }

    fn json(&self) -> Value {
        let TierHits { device, memory, asked } = self.hits;
        json!({
            "vram_percent": self.vram,
            "percent": self.percent,
            "vram": self.share(device),
            "memory": self.share(memory),
            "drive": self.share(asked - device - memory),
            "fixed": self.fixed,
        })
    }
}

fn tier_table(rows: &[TierRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut text =
        "\n|   VRAM | memory |   in VRAM | in memory | from drive |     fixed | % fixed |\n".to_owned();
    text += "|-------:|-------:|----------:|----------:|-----------:|----------:|---------:|\n";
    for row in rows {
        let TierHits { device, memory, asked } = row.hits;
        let [vram, memory, drive] =
            [device, memory, asked - device - memory].map(|hits| 100.0 * row.share(hits));
        text += &format!(
            "| {:>4} % | {:>4} % | {vram:>7.1} % | {memory:>7.1} % | {drive:>8.1} % | {:>7.1} % | {:>6.0} % |\n",
            row.vram,
            row.percent,
            100.0 * row.fixed,
            vram / row.fixed.max(1e-9)
        );
    }
    text
}

/// The traces, and their requests.
struct Played {
    layers: Vec<RoutedLayer>,
    prompt: usize,
    answer: usize,
    workload: Workload,
}

impl Played {
    fn read(paths: &[PathBuf]) -> Result<Played> {
        let mut played: Option<Played> = None;
        for path in paths {
            let trace = Trace::read(path)?;
            let played = played.get_or_insert_with(|| Played::new(trace.layers()));
            if trace.layers() != played.layers {
                let (one, other) = (paths[0].display(), path.display());
                bail!("{one} and {other} are traces of different models; simulate them separately");
            }
            played.prompt += trace.tokens(Phase::Prompt);
            played.answer += trace.tokens(Phase::Answer);
            played.workload.append(&trace);
        }
        match played {
            Some(played) if played.answer > 0 => Ok(played),
            _ => bail!(
                "the traces contain no generated tokens, so there are no cache hits to count; record with `forebay trace -n 2` or more"
            ),
        }
    }

    fn new(layers: &[RoutedLayer]) -> Played {
        let experts = layers.iter().map(|l| l.experts).sum();
        Played { layers: layers.to_vec(), prompt: 0, answer: 0, workload: Workload::new(experts) }
    }

    fn row(&self, percent: usize, bar: &Progress) -> Row {
        let slots = (self.workload.experts() * percent).div_ceil(100).max(self.workload.least_slots());
        let rates = COLUMNS.map(|column| {
            bar.say(format!("{}, {percent} %", column.name()));
            let rate = column.play(&self.workload, slots).rate();
            bar.add(1);
            rate
        });
        Row { percent, slots, rates }
    }

    fn tiers(&self, vram: usize, percent: usize) -> TierRow {
        let slots = |percent: usize| {
            (self.workload.experts() * percent).div_ceil(100).max(self.workload.least_slots())
        };
        let policy = &mut *policy::make(PolicyKind::default(), self.workload.experts());
        let hits = self.workload.play_tiers(slots(vram), slots(percent), policy);
        TierRow { vram, percent, hits, fixed: self.workload.best_fixed_set(slots(vram)).rate() }
    }

    /// Bytes of this many experts of average size.
    fn bytes(&self, slots: usize) -> u64 {
        let all: u128 = self.layers.iter().map(|l| u128::from(l.expert_bytes) * l.experts as u128).sum();
        u64::try_from(all * slots as u128 / self.workload.experts() as u128).unwrap_or(u64::MAX)
    }

    /// Experts used per token.
    fn used(&self) -> usize {
        self.layers.iter().map(|l| l.used).sum()
    }

    fn table(&self, rows: &[Row]) -> String {
        let (experts, used) = (self.workload.experts(), self.used());
        let mut text = format!(
            "{experts} experts ({}), {used} used per token; {} prompt tokens, {} generated tokens.\n\n",
            Bytes(self.bytes(experts)),
            self.prompt,
            self.answer
        );
        let names: String = COLUMNS.iter().map(|c| format!(" {:>9} |", c.name())).collect();
        text += &format!("| budget | slots |    memory |{names}\n");
        text += &format!("|-------:|------:|----------:|{}\n", "----------:|".repeat(COLUMNS.len()));
        for Row { percent, slots, rates } in rows {
            let rates: String = rates.iter().map(|rate| format!(" {:>7.1} % |", rate * 100.0)).collect();
            let memory = Bytes(self.bytes(*slots)).to_string();
            text += &format!("| {percent:>4} % | {slots:>5} | {memory:>9} |{rates}\n");
        }
        text
    }

    fn json(&self, rows: &[Row], tiers: &[TierRow]) -> Value {
        let budget = |row: &Row| {
            let rates: Map<String, Value> =
                COLUMNS.iter().zip(row.rates).map(|(c, rate)| (c.name().to_owned(), rate.into())).collect();
            json!({
                "percent": row.percent,
                "slots": row.slots,
                "bytes": self.bytes(row.slots),
                "hit_rate": rates,
            })
        };
        json!({
            "experts": self.workload.experts(),
            "experts_per_token": self.used(),
            "expert_bytes": self.bytes(self.workload.experts()),
            "prompt_tokens": self.prompt,
            "answer_tokens": self.answer,
            "budgets": rows.iter().map(budget).collect::<Vec<_>>(),
            "tiers": tiers.iter().map(TierRow::json).collect::<Vec<_>>(),
        })
    }
}

fn percent(s: &str) -> Result<usize> {
    match at_least_one(s)? {
        percent if percent > 100 => bail!("a cache has at most 100 per cent of all experts"),
        percent => Ok(percent),
    }
}
