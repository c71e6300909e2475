//! The results in the formats that people, spreadsheets and programs read.

use std::time::SystemTime;

use clap::ValueEnum;
use forebay_engine::internals::forecast::bound::{Bound, Speeds, TokenCost};
use forebay_engine::{Bytes, Engine, Precision};
use forebay_server::rfc3339;
use serde_json::{Map, Value, json};

use super::{Sample, Test};
use crate::inspect::{Summary, parameters_text};

/// The format of the results.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A Markdown table
    Md,
    /// Comma-separated values, with a header
    Csv,
    /// One array of objects
    Json,
    /// One object per line
    Jsonl,
}

/// Values that are the same for all tests of a run.
pub struct Setting {
    /// The path of the model.
    pub file: String,
    pub model: String,
    pub architecture: String,
    /// Bytes of all weights.
    pub size: u64,
    pub parameters: u64,
    pub backend: String,
    pub precision: Precision,
    /// `None` if a GPU computes.
    pub threads: Option<usize>,
    /// Whether a GPU computes in memory of its own.
    pub has_own_memory: bool,
    /// The memory bandwidth in bytes per second: of reads in RAM, or of a copy in GPU memory, reads and writes together.
    pub read_bandwidth: f64,
    /// The speed of the drive in bytes per second, if experts are streamed.
    pub drive_speed: Option<f64>,
    /// The speed of uploads in bytes per second, if experts are uploaded to a GPU.
    pub link_speed: Option<f64>,
}

impl Setting {
    pub fn new(engine: &Engine, precision: Precision, read_bandwidth: f64, speeds: &Speeds) -> Setting {
        let file = engine.file();
        let summary = Summary::new(file);
        let architecture = summary.architecture.unwrap_or_default().to_owned();
        let named = || file.path().file_stem().map(|name| name.to_string_lossy().into_owned());
        Setting {
            file: file.path().display().to_string(),
            model: summary.name.map(str::to_owned).or_else(named).unwrap_or_default(),
            architecture,
            size: file.tensors.iter().map(|t| t.len).sum(),
            parameters: summary.parameters,
            backend: engine.backend_name(),
            precision,
            threads: (!engine.is_on_device()).then(|| engine.threads()),
            has_own_memory: engine.plan().device.is_some(),
            read_bandwidth,
            drive_speed: speeds.drive,
            link_speed: speeds.link,
        }
    }

    fn is_processors(&self) -> bool {
        self.threads.is_some()
    }

    /// Whether experts are uploaded to a GPU while it computes.
    fn lifts_experts(&self) -> bool {
        self.link_speed.is_some()
    }

    /// Whether experts are read or uploaded: a GPU may have all of them in its memory.
    fn moves_experts(&self) -> bool {
        !self.has_own_memory || self.lifts_experts()
    }
}

/// The result of one test.
pub struct Row {
    pub test: Test,
    /// When the test started.
    pub start: SystemTime,
    /// Tokens per second of each run.
    pub samples: Vec<f64>,
    /// Bytes that a token reads, if each token is computed alone.
    pub bytes_per_token: Option<u64>,
    /// The cost of a token, if experts are streamed.
    pub streaming: Option<TokenCost>,
    pub cache: Cache,
}

/// The state of the expert cache before a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// The state before the test.
    Cold,
    /// The state after the run before.
    Warm,
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Cache::Cold => "cold",
            Cache::Warm => "warm",
        }
    }
}

impl Row {
    /// The rows of a test. If experts are streamed, the first run has its own row.
    pub fn of(engine: &Engine, test: Test, start: SystemTime, samples: Vec<Sample>) -> Vec<Row> {
        let streams = engine.plan().moves_experts();
        let row = |cache, samples: &[Sample]| Row {
            test,
            start,
            samples: samples.iter().map(|s| s.tokens_per_second).collect(),
            bytes_per_token: test.bytes_per_token(engine),
            streaming: streams.then(|| TokenCost::mean(&samples.iter().map(|s| s.cost).collect::<Vec<_>>())),
            cache,
        };
        let (first, rest) = samples.split_at(1);
        let cold = streams.then(|| row(Cache::Cold, first));
        cold.into_iter().chain([row(Cache::Warm, rest)]).collect()
    }

    /// The limit of the generation speed, if experts are streamed.
    fn bound(&self, setting: &Setting) -> Option<Bound> {
        // An expert computes many tokens of a prompt, so only the speed of reading and uploading limits it; mostly on a GPU.
        let bounds = self.test.one_by_one() || setting.lifts_experts();
        let cost = self.streaming.filter(|_| bounds)?;
        let memory = Some(setting.read_bandwidth);
        Bound::of(&cost, &Speeds { memory, drive: setting.drive_speed, link: setting.link_speed })
    }

    fn mean(&self) -> f64 {
        mean(&self.samples)
    }

    fn deviation(&self) -> f64 {
        deviation(&self.samples)
    }

    /// Nanoseconds of each run.
    fn nanoseconds(&self) -> Vec<u64> {
        let tokens = (self.test.tokens * self.test.answers) as f64;
        self.samples.iter().map(|rate| (1e9 * tokens / rate).round() as u64).collect()
    }

    fn median(&self) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len().is_multiple_of(2) {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        } else {
            sorted[middle]
        }
    }

    /// The bytes per second at the mean speed.
    fn traffic(&self) -> Option<f64> {
        self.bytes_per_token.map(|bytes| bytes as f64 * self.mean())
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The standard deviation of a population with these values as a sample; 0 for one value.
fn deviation(values: &[f64]) -> f64 {
    let (n, mean) = (values.len(), mean(values));
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 }
}

impl Format {
    /// The text before the first row.
    pub fn begin(self, setting: &Setting) -> String {
        match self {
            Format::Md => {
                let titles: Vec<_> =
                    columns(setting).map(|c| pad(c.title, c.width(setting), c.right)).collect();
                let rules: Vec<_> = columns(setting)
                    .map(|c| {
                        let dashes = "-".repeat(c.width(setting) - 1);
                        if c.right { format!("{dashes}:") } else { format!("{dashes}-") }
                    })
                    .collect();
                format!("| {} |\n| {} |\n", titles.join(" | "), rules.join(" | "))
            }
            Format::Csv => {
                let names: Vec<_> =
                    fields(setting, &Row::example()).into_iter().map(|(name, _)| name).collect();
                format!("{}\n", names.join(","))
            }
            Format::Json | Format::Jsonl => String::new(),
        }
    }

    /// The text of one row. A JSON array is written as a whole at the [end](Self::end).
    pub fn row(self, setting: &Setting, row: &Row) -> String {
        match self {
            Format::Md => {
                let cells: Vec<_> = columns(setting)
                    .map(|c| pad(&(c.cell)(setting, row), c.width(setting), c.right))
                    .collect();
                format!("| {} |\n", cells.join(" | "))
            }
            Format::Csv => {
                let values: Vec<_> =
                    fields(setting, row).into_iter().map(|(_, value)| csv_field(&value)).collect();
                format!("{}\n", values.join(","))
            }
            Format::Json => String::new(),
            Format::Jsonl => format!("{}\n", object(setting, row)),
        }
    }

    /// The text after the last row.
    pub fn end(self, setting: &Setting, rows: &[Row]) -> String {
        match self {
            Format::Md => {
                let bandwidth = giga(setting.read_bandwidth);
                let link = setting.link_speed.map_or(String::new(), |speed| {
                    format!("upload bandwidth to the GPU (PCIe): {:.1} GB/s\n", giga(speed))
                });
                let drive = setting.drive_speed.map_or(String::new(), |speed| {
                    format!("drive read bandwidth: {:.1} GB/s\n", giga(speed))
                });
                match setting.threads {
                    None => format!(
                        "\nGPU memory bandwidth (copy, reads and writes): {bandwidth:.0} GB/s\n{link}{drive}"
                    ),
                    Some(threads) => {
                        let plural = if threads == 1 { "" } else { "s" };
                        format!(
                            "\nRAM read bandwidth: {bandwidth:.1} GB/s with {threads} thread{plural}\n{drive}"
                        )
                    }
                }
            }
            Format::Json => {
                let rows = rows.iter().map(|row| object(setting, row)).collect();
                format!("{:#}\n", Value::Array(rows))
            }
            Format::Csv | Format::Jsonl => String::new(),
        }
    }
}

/// A column of the table for people.
struct Column {
    title: &'static str,
    least: usize,
    right: bool,
    cell: fn(&Setting, &Row) -> String,
    /// Whether the column is shown in this setting.
    shown: fn(&Setting) -> bool,
}

impl Column {
    const fn where_it_is(self, shown: fn(&Setting) -> bool) -> Column {
        Column { shown, ..self }
    }

    /// Rows are written as they are measured, so the width is known from the start.
    fn width(&self, setting: &Setting) -> usize {
        let constant = (self.cell)(setting, &Row::example()).chars().count();
        self.least.max(self.title.chars().count()).max(constant)
    }
}

const fn column(
    title: &'static str,
    least: usize,
    right: bool,
    cell: fn(&Setting, &Row) -> String,
) -> Column {
    Column { title, least, right, cell, shown: |_| true }
}

const COLUMNS: &[Column] = &[
    column("model", 0, false, |s, _| format!("{} ({})", s.model, s.architecture).replace('|', "/")),
    column("size", 0, true, |s, _| Bytes(s.size).to_string()),
    column("params", 0, true, |s, _| parameters_text(s.parameters)),
    column("backend", 0, false, |s, _| match s.precision {
        Precision::Fast => s.backend.clone(),
        Precision::Exact => format!("{} exact", s.backend),
    }),
    column("threads", 0, true, |s, _| s.threads.map_or(String::new(), |n| n.to_string()))
        .where_it_is(Setting::is_processors),
    column("test", 14, true, |_, r| r.test.name()),
    column("t/s", 18, true, |_, r| format!("{:.2} ± {:.2}", r.mean(), r.deviation())),
    column("bytes/token", 0, true, |_, r| r.bytes_per_token.map_or(String::new(), |b| Bytes(b).to_string())),
    column("GB/s", 6, true, |_, r| r.traffic().map_or(String::new(), |t| format!("{:.1}", giga(t)))),
    column("% of RAM bandwidth", 0, true, bandwidth_share).where_it_is(Setting::is_processors),
    column("% of GPU bandwidth", 0, true, bandwidth_share).where_it_is(|s| !s.is_processors()),
    column("cache", 0, false, |_, r| r.cache.name().into()).where_it_is(Setting::moves_experts),
    column("cache hits", 0, true, |_, r| {
        r.streaming.map_or(String::new(), |s| format!("{:.0} %", 100.0 * s.hit_rate))
    })
    .where_it_is(Setting::moves_experts),
    column("GPU hits", 0, true, |_, r| {
        r.streaming.map_or(String::new(), |s| format!("{:.0} %", 100.0 * s.device_hit_rate))
    })
    .where_it_is(Setting::lifts_experts),
    column("PCIe/token", 0, true, |_, r| {
        r.streaming.map_or(String::new(), |s| Bytes(s.bytes_lifted as u64).to_string())
    })
    .where_it_is(Setting::lifts_experts),
    column("drive/token", 0, true, |_, r| {
        r.streaming.map_or(String::new(), |s| Bytes(s.bytes_read as u64).to_string())
    })
    .where_it_is(Setting::moves_experts),
    column("% of the limit", 0, true, |s, r| {
        r.bound(s).map_or(String::new(), |bound| {
            format!("{} {:.0} %", bound.by.name(), 100.0 * r.mean() / bound.tokens_per_second)
        })
    })
    .where_it_is(Setting::moves_experts),
];

fn bandwidth_share(setting: &Setting, row: &Row) -> String {
    row.traffic()
        .map_or(String::new(), |traffic| format!("{:.0} %", 100.0 * traffic / setting.read_bandwidth))
}

/// The columns that are shown in this setting.
fn columns(setting: &Setting) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(|column| (column.shown)(setting))
}

impl Row {
    /// A row with values of ordinary length.
    fn example() -> Row {
        Row {
            test: Test { kind: super::TestKind::Prompt, tokens: 1, depth: 0, answers: 1 },
            start: SystemTime::UNIX_EPOCH,
            samples: vec![0.0],
            bytes_per_token: None,
            streaming: None,
            cache: Cache::Warm,
        }
    }
}

/// All fields of a row, in order.
fn fields(setting: &Setting, row: &Row) -> Vec<(&'static str, Value)> {
    let Test { kind, tokens, depth, answers } = row.test;
    let (traffic, bound) = (row.traffic(), row.bound(setting));
    vec![
        ("model", json!(setting.model)),
        ("architecture", json!(setting.architecture)),
        ("size", json!(setting.size)),
        ("params", json!(setting.parameters)),
        ("backend", json!(setting.backend)),
        (
            "precision",
            json!(match setting.precision {
                Precision::Fast => "fast",
                Precision::Exact => "exact",
            }),
        ),
        ("threads", json!(setting.threads)),
        ("test", json!(row.test.name())),
        ("n_prompt", json!(if kind == super::TestKind::Prompt { tokens } else { 0 })),
        ("n_gen", json!(if kind == super::TestKind::Generation { tokens } else { 0 })),
        ("depth", json!(depth)),
        ("parallel", json!(answers)),
        ("repetitions", json!(row.samples.len())),
        ("avg", json!(row.mean())),
        ("stddev", json!(row.deviation())),
        ("median", json!(row.median())),
        ("bytes_per_token", json!(row.bytes_per_token)),
        ("gb_per_s", json!(traffic.map(giga))),
        ("read_gb_per_s", json!(giga(setting.read_bandwidth))),
        ("bandwidth_share", json!(traffic.map(|t| t / setting.read_bandwidth))),
        ("cache", json!(row.cache.name())),
        ("hit_rate", json!(row.streaming.map(|s| s.hit_rate))),
        ("gpu_hit_rate", json!(row.streaming.map(|s| s.device_hit_rate))),
        ("lifted_bytes_per_token", json!(row.streaming.map(|s| s.bytes_lifted))),
        ("link_gb_per_s", json!(setting.link_speed.map(giga))),
        ("drive_bytes_per_token", json!(row.streaming.map(|s| s.bytes_read))),
        ("dense_seconds", json!(row.streaming.map(|s| s.dense_seconds))),
        ("wait_seconds", json!(row.streaming.map(|s| s.wait_seconds))),
        ("drive_gb_per_s", json!(setting.drive_speed.map(giga))),
        ("bound_by", json!(bound.map(|bound| bound.by.name()))),
        ("bound", json!(bound.map(|bound| bound.tokens_per_second))),
        ("bound_share", json!(bound.map(|bound| row.mean() / bound.tokens_per_second))),
    ]
}

/// A row as an object: its fields, the value of each run, and the fields for programs that read llama-bench's results.
fn object(setting: &Setting, row: &Row) -> Value {
    let fields = fields(setting, row).into_iter().chain([("samples", json!(row.samples))]);
    let all = fields.chain(llama_bench(setting, row)).map(|(name, value)| (name.to_owned(), value));
    Value::Object(all.collect::<Map<_, _>>())
}

/// Fields that have another name in llama-bench, under that name.
fn llama_bench(setting: &Setting, row: &Row) -> [(&'static str, Value); 13] {
    let samples_ns = row.nanoseconds();
    let times: Vec<f64> = samples_ns.iter().map(|&ns| ns as f64).collect();
    let start = row.start.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    [
        ("model_filename", json!(setting.file)),
        ("model_type", json!(format!("{} {}", setting.architecture, parameters_text(setting.parameters)))),
        ("model_size", json!(setting.size)),
        ("model_n_params", json!(setting.parameters)),
        ("n_threads", json!(setting.threads)),
        ("n_depth", json!(row.test.depth)),
        ("test_time", json!(rfc3339(start))),
        ("avg_ns", json!(mean(&times).round() as u64)),
        ("stddev_ns", json!(deviation(&times).round() as u64)),
        ("avg_ts", json!(row.mean())),
        ("stddev_ts", json!(row.deviation())),
        ("samples_ns", json!(samples_ns)),
        ("samples_ts", json!(row.samples)),
    ]
}

/// A CSV field: quoted if it contains a separator, empty if the value is unknown.
fn csv_field(value: &Value) -> String {
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

fn pad(text: &str, width: usize, right: bool) -> String {
    if right { format!("{text:>width$}") } else { format!("{text:<width$}") }
}

fn giga(bytes: f64) -> f64 {
    bytes / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::TestKind;

    fn row(samples: &[f64]) -> Row {
        let test = Test { kind: TestKind::Generation, tokens: 16, depth: 512, answers: 1 };
        Row {
            test,
            start: SystemTime::UNIX_EPOCH,
            samples: samples.to_vec(),
            bytes_per_token: Some(2_000_000),
            streaming: None,
            cache: Cache::Warm,
        }
    }

    fn setting() -> Setting {
        Setting {
            file: "small.gguf".into(),
            model: "A \"small\", quick one".into(),
            architecture: "qwen3moe".into(),
            size: 3 << 20,
            parameters: 5_000_000,
            backend: "CPU scalar".into(),
            precision: Precision::Fast,
            threads: Some(2),
            has_own_memory: false,
            read_bandwidth: 4e9,
            drive_speed: None,
            link_speed: None,
        }
    }

    #[test]
    fn mean_deviation_and_median_are_those_of_the_runs() {
        let odd = row(&[4.0, 1.0, 1.0]);
        assert_eq!((odd.mean(), odd.median()), (2.0, 1.0));
        assert!((odd.deviation() - 3f64.sqrt()).abs() < 1e-12);
        let even = row(&[1.0, 8.0, 2.0, 4.0]);
        assert_eq!(even.median(), 3.0);
        assert_eq!((row(&[7.0]).mean(), row(&[7.0]).deviation(), row(&[7.0]).median()), (7.0, 0.0, 7.0));
    }

    #[test]
    fn a_share_of_the_bandwidth_is_bytes_times_tokens() {
        let object = object(&setting(), &row(&[400.0, 600.0]));
        assert_eq!((&object["gb_per_s"], &object["bandwidth_share"]), (&json!(1.0), &json!(0.25)));
        assert_eq!(
            (&object["n_prompt"], &object["n_gen"], &object["depth"]),
            (&json!(0), &json!(16), &json!(512))
        );
        let line = Format::Md.row(&setting(), &row(&[400.0, 600.0]));
        assert!(line.contains("tg16 @ d512") && line.contains("500.00 ± 141.42"), "{line}");
        assert!(line.contains("| 1.9 MiB |") || line.contains(" 1.9 MiB |"), "{line}");
        assert!(line.contains("   1.0 |               25 % |"), "{line}");
    }

    #[test]
    fn commas_and_quotes_do_not_break_a_line_of_csv() {
        let line = Format::Csv.row(&setting(), &row(&[1.0]));
        assert!(line.starts_with(
            "\"A \"\"small\"\", quick one\",qwen3moe,3145728,5000000,CPU scalar,fast,2,tg16 @ d512,"
        ));
    }

    #[test]
    fn the_rows_of_a_table_are_as_wide_as_its_header() {
        for setting in [setting(), on_gpu()] {
            let header = Format::Md.begin(&setting);
            let line = Format::Md.row(&setting, &row(&[12345.67, 12345.67]));
            let widths: Vec<_> = header.lines().chain(line.lines()).map(|l| l.chars().count()).collect();
            assert!(widths.iter().all(|w| w == &widths[0]), "{header}{line}");
        }
    }

    fn on_gpu() -> Setting {
        Setting { threads: None, has_own_memory: true, backend: "A Large One (CUDA 9.0)".into(), ..setting() }
    }

    #[test]
    fn a_gpu_has_neither_threads_nor_a_drive() {
        let header = Format::Md.begin(&on_gpu());
        for title in ["threads", "cache", "hits", "drive", "limit", "RAM"] {
            assert!(!header.contains(title) && Format::Md.begin(&setting()).contains(title), "{header}");
        }
        let line = Format::Md.row(&on_gpu(), &row(&[400.0, 600.0]));
        assert!(line.ends_with("   1.0 |               25 % |\n"), "{line}");
        let end = Format::Md.end(&on_gpu(), &[]);
        assert_eq!(end, "\nGPU memory bandwidth (copy, reads and writes): 4 GB/s\n");
        assert_eq!(object(&on_gpu(), &row(&[1.0]))["threads"], Value::Null);
    }
}
