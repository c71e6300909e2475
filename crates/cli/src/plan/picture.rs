//! Bars that show where a model's parts are, as wide as the terminal.

use forebay_engine::Bytes;
use forebay_engine::plan::Plan;

/// The longest line, where the terminal is wider or there is none.
const WIDEST: usize = 100;

/// The shortest line: narrower bars would show nothing.
const NARROWEST: usize = 40;

/// A part of a bar.
struct Segment {
    mark: char,
    name: String,
    bytes: u64,
}

fn part(mark: char, name: impl Into<String>, bytes: u64) -> Segment {
    Segment { mark, name: name.into(), bytes }
}

/// Columns of the terminal, if standard output is one.
pub fn width() -> usize {
    terminal_size::terminal_size_of(std::io::stdout())
        .map_or(WIDEST, |(width, _)| usize::from(width.0))
        .clamp(NARROWEST, WIDEST)
}

/// Where everything would be: a bar for GPU memory if there is a GPU, one for RAM, and one for the model's experts.
pub fn picture(plan: &Plan, width: usize) -> String {
    let context = || format!("context of {}", plan.reserved);
    let slots = plan.slots.iter().sum::<usize>();
    let mut text = String::new();
    if let Some(gpu) = &plan.device {
        let parts = [
            part('█', "dense weights", gpu.dense),
            part('▓', context(), gpu.kv),
            part('#', "scratch", gpu.scratch),
            part('▒', "experts", gpu.slot_bytes),
            part(' ', "free", gpu.budget.saturating_sub(gpu.total())),
        ];
        text += &bar("GPU", &parts, width);
    }
    let free = plan.budget.saturating_sub(plan.total());
    let memory = [
        part('█', "dense weights", plan.dense),
        part('▓', context(), plan.kv),
        part(
            '#',
            "scratch, program",
            plan.scratch.saturating_add(plan.requests).saturating_add(plan.process),
        ),
        part('▒', "experts", plan.slot_bytes),
        part(' ', "free", if plan.budget == u64::MAX { 0 } else { free }),
    ];
    text += &bar("memory", &memory, width);
    if plan.expert_count > 0 {
        // With a GPU the same expert may be in both memories; the slots of RAM are shown as far as the GPU leaves experts to them.
        let on_gpu = plan.device.as_ref().map_or(0, |gpu| gpu.slot_bytes).min(plan.experts);
        let in_memory = plan.slot_bytes.min(plan.experts - on_gpu);
        let on_drive = plan.experts - on_gpu - in_memory;
        let mut experts = Vec::new();
        if let Some(gpu) = &plan.device {
            let name = format!("in GPU memory, {} of {}", gpu.slot_count(), plan.expert_count);
            experts.push(part('█', name, on_gpu));
        }
        experts.push(part('▒', format!("in memory, {slots} of {}", plan.expert_count), in_memory));
        experts.push(part('░', "on the drive", on_drive));
        text += &bar("experts", &experts, width);
    }
    text
}

/// A bar, with a legend below it.
fn bar(name: &str, parts: &[Segment], width: usize) -> String {
    const MARGIN: usize = 10;
    let cells = cells(&parts.iter().map(|p| p.bytes).collect::<Vec<_>>(), width - MARGIN - 2);
    let drawn: String =
        parts.iter().zip(&cells).flat_map(|(p, &cells)| std::iter::repeat_n(p.mark, cells)).collect();
    let mut text = format!("{name:<MARGIN$}[{drawn}]\n");
    let mut line = String::new();
    for p in parts.iter().filter(|p| p.bytes > 0) {
        let mark = if p.mark == ' ' { '·' } else { p.mark };
        let entry = format!("{mark} {} {}", p.name, Bytes(p.bytes));
        if !line.is_empty() && MARGIN + line.chars().count() + 3 + entry.chars().count() > width {
            text += &format!("{:MARGIN$}{line}\n", "");
            line.clear();
        }
        if !line.is_empty() {
            line.push_str("   ");
        }
        line += &entry;
    }
    text + &format!("{:MARGIN$}{line}\n", "")
}

/// Divides a bar: in proportion, but at least one cell for each part that is not empty.
fn cells(parts: &[u64], width: usize) -> Vec<usize> {
    let total: f64 = parts.iter().map(|&p| p as f64).sum();
    let mut cells: Vec<usize> = parts
        .iter()
        .map(|&p| if p == 0 { 0 } else { ((p as f64 / total * width as f64).round() as usize).max(1) })
        .collect();
    // The largest part makes up for rounding.
    let sum: usize = cells.iter().sum();
    if let Some(largest) = cells.iter_mut().max().filter(|cells| **cells > 0) {
        *largest = (*largest + width).saturating_sub(sum).max(1);
    }
    cells
}

#[cfg(test)]
mod tests {
    use forebay_engine::plan::DevicePlan;

    use super::super::tests::plan;
    use super::*;

    #[test]
    fn a_bar_is_as_wide_as_asked_and_hides_nothing() {
        assert_eq!(cells(&[50, 50], 10), [5, 5]);
        assert_eq!(cells(&[1, 1_000_000, 1], 10), [1, 8, 1]);
        assert_eq!(cells(&[1, 1, 1], 10).iter().sum::<usize>(), 10);
        assert_eq!(cells(&[0, 7], 10), [0, 10]);
        assert_eq!(cells(&[0, 0], 10), [0, 0]);
        assert_eq!(cells(&[u64::MAX, u64::MAX], 10), [5, 5]);
    }

    #[test]
    fn the_picture_fits_its_width() {
        let plan = plan();
        for width in [40, 60, 80, 100] {
            let text = picture(&plan, width);
            let bars: Vec<&str> = text.lines().filter(|line| line.contains('[')).collect();
            assert_eq!(bars.len(), 2);
            assert!(bars.iter().all(|bar| bar.chars().count() == width), "{text}");
            for said in ["dense weights 1.0 GiB", "context of 8192 800.0 MiB", "experts 4.0 GiB"] {
                assert!(text.contains(said), "{text}");
            }
            assert!(text.contains("in memory, 1300 of 6144") && text.contains("on the drive 14.0 GiB"));
        }
        let resident = Plan { slots: vec![6144], slot_bytes: 18 << 30, budget: u64::MAX, ..plan.clone() };
        assert!(!picture(&resident, 80).contains("free") && !picture(&resident, 80).contains("drive"));
        let device = DevicePlan {
            budget: 12 << 30,
            dense: 1 << 30,
            slot_bytes: 9 << 30,
            slots: vec![3072],
            scratch: 300 << 20,
            kv: 800 << 20,
        };
        let text = picture(&Plan { device: Some(device), ..plan }, 100);
        assert!(text.starts_with("GPU       [") && text.lines().filter(|l| l.contains('[')).count() == 3);
        assert!(
            text.contains("in GPU memory, 3072 of 6144 9.0 GiB") && text.contains("on the drive 5.0 GiB")
        );
    }
}
