//! `forebay inspect`: shows what is in a model file.

mod portrait;

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use forebay_engine::Bytes;
use forebay_engine::internals::format::{ModelFile, NumberArray, StringArray, Value};
use forebay_engine::internals::models::keys;
use forebay_hub::Sight;
use serde_json::{Map, json};

use self::portrait::Portrait;
use crate::args::RequiredModelArgs;
use crate::output::print;
use crate::pull;

/// Arrays up to this length are printed whole; a vocabulary is only counted.
const SHORT_ARRAY: usize = 32;

/// Show what is in a model file, without reading its weights
///
/// Describes the model: the size of its parts, the bytes read per token, and the least memory that it runs in. Works on
/// every GGUF file and every safetensors folder, including vocabularies and models that Forebay cannot run. A tensor of an
/// unknown type is listed with the number of the type, as in `type 142`, and without a size.
///
/// For a model on the hub that is not downloaded, only the header is read, a few megabytes.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay inspect model.gguf
  forebay inspect model.gguf --tensors | grep exps
  forebay inspect folder --json | jq .metadata
  forebay inspect OWNER/NAME:Q4_K_M")]
pub struct InspectArgs {
    #[command(flatten)]
    model: RequiredModelArgs,
    /// Print one JSON object; arrays of more than 32 elements are shown by type and length
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// List every tensor (in JSON as `tensor_list`)
    #[arg(long, help_heading = "Output")]
    tensors: bool,
}

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<ExitCode> {
    let sight = pull::sight(args.model.get()?)?;
    let file = ModelFile::survey(&sight.path)?;
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&as_json(&file, &sight, args.tensors))?;
        text.push('\n');
        text
    } else {
        as_text(&file, args.tensors)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The model's sizes, as far as the metadata has them.
pub struct Summary<'a> {
    /// The family.
    pub architecture: Option<&'a str>,
    /// The model's name.
    pub name: Option<&'a str>,
    /// The number of weights.
    pub parameters: u64,
    layers: Option<u64>,
    experts: Option<u64>,
    experts_used: Option<u64>,
    /// The model's maximum context.
    pub context: Option<u64>,
}

impl<'a> Summary<'a> {
    pub fn new(file: &'a ModelFile) -> Summary<'a> {
        let count = |key| file.setting(&key)?.1.as_u64();
        Summary {
            architecture: file.architecture(),
            name: file.metadata.str("general.name"),
            parameters: file.parameters(),
            layers: count(keys::LAYERS),
            experts: count(keys::EXPERTS),
            experts_used: count(keys::EXPERTS_USED),
            context: count(keys::CONTEXT),
        }
    }
}

fn as_json(file: &ModelFile, sight: &Sight, list_tensors: bool) -> serde_json::Value {
    let summary = Summary::new(file);
    let metadata: Map<_, _> = file.metadata.iter().map(|(k, v)| (k.to_owned(), value_json(v))).collect();
    let mut object = json!({
        "format": file.format.name(),
        "architecture": summary.architecture,
        "name": summary.name,
        "parameters": summary.parameters,
        "bytes": file.bytes(),
        "files": file.files.iter().map(|f| sight.name_of(&f.path)).collect::<Vec<_>>(),
        "tensors": file.tensors.len() + file.unknown.len(),
        "layers": summary.layers,
        "experts": summary.experts,
        "experts_used": summary.experts_used,
        "context": summary.context,
        "metadata": metadata,
    });
    Portrait::new(file).add_to(&mut object);
    if list_tensors {
        let tensors = file.tensors.iter().map(|t| {
            json!({
                "name": t.name,
                "type": t.dtype.name(),
                "shape": t.shape,
                "file": t.file.0,
                "offset": t.offset,
                "bytes": t.len,
            })
        });
        let unknown = file.unknown.iter().map(|t| {
            json!({
                "name": t.name,
                "type": format!("type {}", t.type_id),
                "shape": t.shape,
                "file": t.file.0,
                "offset": t.offset,
                "bytes": null,
            })
        });
        object["tensor_list"] = tensors.chain(unknown).collect();
    }
    object
}

fn as_text(file: &ModelFile, list_tensors: bool) -> String {
    let summary = Summary::new(file);
    let portrait = Portrait::new(file);
    let mut text = format!("{}\n\n", portrait.sentence());
    let mut row = |label: &str, value: Option<String>| {
        if let Some(value) = value {
            text += &format!("{label:<15}{value}\n");
        }
    };
    let count = |n: Option<u64>| n.map(|n| n.to_string());
    row("format", Some(file.format.name().to_owned()));
    row("architecture", summary.architecture.map(str::to_owned));
    row("name", summary.name.map(str::to_owned));
    row("parameters", Some(parameters_text(summary.parameters)));
    let files = if file.files.len() > 1 { format!(" in {} files", file.files.len()) } else { String::new() };
    row("size", Some(format!("{}{files}", Bytes(file.bytes()))));
    row("tensors", Some((file.tensors.len() + file.unknown.len()).to_string()));
    row("unknown types", unknown_types(file));
    row("layers", count(summary.layers));
    row("experts", count(summary.experts));
    row("experts used", count(summary.experts_used));
    row("context", count(summary.context));
    text += &portrait.text();
    text += "\nmetadata\n";
    for (key, value) in file.metadata.iter() {
        text += &format!("  {key} = {}\n", value_text(value));
    }
    if list_tensors {
        text += "\ntensors\n";
        for t in &file.tensors {
            text += &format!(
                "  {:<40} {:<8} {:<20} {}\n",
                t.name,
                t.dtype.name(),
                format!("{:?}", t.shape),
                Bytes(t.len)
            );
        }
        for t in &file.unknown {
            let (kind, shape) = (format!("type {}", t.type_id), format!("{:?}", t.shape));
            text += &format!("  {:<40} {kind:<8} {shape:<20} unknown size\n", t.name);
        }
    }
    text
}

/// The number of tensors with unknown types, and the numbers of those types; `None` if there are none.
fn unknown_types(file: &ModelFile) -> Option<String> {
    let types: BTreeSet<u32> = file.unknown.iter().map(|t| t.type_id).collect();
    let types: Vec<_> = types.iter().map(u32::to_string).collect();
    let count = file.unknown.len();
    (count > 0).then(|| format!("{} (tensors: {count}; sizes unknown)", types.join(", ")))
}

/// A number of parameters in the style of model names: `27.8 M`, `30.5 B`.
pub fn parameters_text(count: u64) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.1} K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.1} B", count as f64 / 1e9),
    }
}

fn value_text(value: &Value) -> String {
    match value {
        // A text may have control characters and hundreds of lines.
        Value::String(s) if s.chars().count() > 100 => {
            let start: String = s.chars().take(100).collect();
            format!("{start:?}… ({} characters)", s.chars().count())
        }
        Value::String(s) => format!("{s:?}"),
        // Most numbers in a file are f32, and 1e-6 as an f32 has many digits as an f64.
        Value::Float(v) if f64::from(*v as f32) == *v => format!("{:?}", *v as f32),
        Value::Strings(a) if a.len() > SHORT_ARRAY => format!("{} strings", a.len()),
        Value::Numbers(a) if a.len() > SHORT_ARRAY => format!("{} × {}", a.len(), kind_name(a)),
        other => value_json(other).to_string(),
    }
}

fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::Unsigned(v) => json!(v),
        Value::Signed(v) => json!(v),
        Value::Float(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Strings(a) if a.len() > SHORT_ARRAY => long_array("string", a.len()),
        Value::Strings(a) => StringArray::iter(a).map(|s| json!(s)).collect(),
        Value::Numbers(a) if a.len() > SHORT_ARRAY => long_array(&kind_name(a), a.len()),
        Value::Numbers(a) => a.iter().map(|v| value_json(&v)).collect(),
    }
}

fn long_array(kind: &str, len: usize) -> serde_json::Value {
    json!({ "array": kind, "length": len })
}

fn kind_name(array: &NumberArray) -> String {
    format!("{:?}", array.kind()).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_as_model_names_count_them() {
        assert_eq!(parameters_text(0), "0");
        assert_eq!(parameters_text(999), "999");
        assert_eq!(parameters_text(296_100), "296.1 K");
        assert_eq!(parameters_text(27_824_896), "27.8 M");
        assert_eq!(parameters_text(30_532_122_624), "30.5 B");
    }

    #[test]
    fn numbers_are_printed_as_they_were_written() {
        assert_eq!(value_text(&Value::Float(f64::from(1e-6_f32))), "1e-6");
        assert_eq!(value_text(&Value::Float(f64::from(10000.0_f32))), "10000.0");
        assert_eq!(value_text(&Value::Float(0.1)), "0.1");
    }
}
