//! Bars that show where a model's parts are, as wide as the terminal.

use forebay_engine::Bytes;
use forebay_engine::plan::Plan;

/// What lines are at most, where the terminal is wider or there is none.
const WIDEST: usize = 100;

/// Narrower bars would show nothing.
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

/// Where everything would be: a bar for the memory, and one for the model's experts.
pub fn picture(plan: &Plan, width: usize) -> String {
    let free = plan.budget.saturating_sub(plan.total());
    let memory = [
        part('█', "dense weights", plan.dense),
        part('▓', format!("context of {}", plan.reserved), plan.kv),
        part(
            '#',
            "scratch, program",
            plan.scratch.saturating_add(plan.requests).saturating_add(plan.process),
        ),
        part('▒', "experts", plan.slot_bytes),
        part(' ', "free", if plan.budget == u64::MAX { 0 } else { free }),
    ];
    let mut text = bar("memory", &memory, width);
    if plan.expert_count > 0 {
        let slots: usize = plan.slots.iter().sum();
        let on_drive = plan.experts.saturating_sub(plan.slot_bytes);
        let in_memory = format!("in memory, {slots} of {}", plan.expert_count);
        let experts =
            [part('▒', in_memory, plan.slot_bytes.min(plan.experts)), part('░', "on the drive", on_drive)];
        text += &bar("experts", &experts, width);
    }
    text
}

/// A bar with what its marks mean below it.
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

/// Divides a bar: in proportion, but at least a cell for whatever there is.
fn cells(parts: &[u64], width: usize) -> Vec<usize> {
    let total: f64 = parts.iter().map(|&p| p as f64).sum();
    let mut cells: Vec<usize> = parts
        .iter()
        .map(|&p| if p == 0 { 0 } else { ((p as f64 / total * width as f64).round() as usize).max(1) })
        .collect();
    // What rounding has added or taken, the largest gives or gets.
    let sum: usize = cells.iter().sum();
    if let Some(largest) = cells.iter_mut().max().filter(|cells| **cells > 0) {
        *largest = (*largest + width).saturating_sub(sum).max(1);
    }
    cells
}

#[cfg(test)]
mod tests {
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
        let plan = Plan {
            budget: 6 << 30,
            dense: 1 << 30,
            kv: 800 << 20,
            scratch: 100 << 20,
            requests: 0,
            process: 60 << 20,
            slot_bytes: 4 << 30,
            slots: vec![1300],
            experts: 18 << 30,
            expert_count: 6144,
            chunk: 512,
            context: 32768,
            reserved: 8192,
            device: None,
        };
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
        let resident = Plan { slots: vec![6144], slot_bytes: 18 << 30, budget: u64::MAX, ..plan };
        assert!(!picture(&resident, 80).contains("free") && !picture(&resident, 80).contains("drive"));
    }
}
