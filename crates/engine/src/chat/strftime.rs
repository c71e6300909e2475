//! Formats dates, for templates that tell the model the date.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time like Python's `strftime`, in UTC. Unknown codes are copied.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let now = Moment::at(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let rest = chars.as_str();
        // A dash omits padding.
        let (padded, code) = match rest.strip_prefix('-') {
            Some(after) => (false, after.chars().next()),
            None => (true, rest.chars().next()),
        };
        match code.and_then(|code| now.field(code, padded)) {
            Some(text) => {
                out.push_str(&text);
                chars.nth(usize::from(!padded));
            }
            None => out.push('%'),
        }
    }
    out
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A time in the calendar.
struct Moment {
    year: u64,
    /// From 0.
    month: usize,
    /// From 1.
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// Sunday is 0.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Moment {
    /// A time before 1970 counts as the start of 1970.
    fn at(time: SystemTime) -> Moment {
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // The calendar repeats every 400 years; the rest takes less than a thousand steps.
        const DAYS_OF_400_YEARS: u64 = 146_097;
        let mut year = 1970 + days / DAYS_OF_400_YEARS * 400;
        let mut left = days % DAYS_OF_400_YEARS;
        while left >= days_of_year(year) {
            left -= days_of_year(year);
            year += 1;
        }
        let day_of_year = left + 1;
        let mut month = 0;
        while left >= days_of_month(year, month) {
            left -= days_of_month(year, month);
            month += 1;
        }
        Moment {
            year,
            month,
            day: left + 1,
            day_of_year,
            // 1 January 1970 was a Thursday.
            weekday: ((days + 4) % 7) as usize,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    /// The value of a `strftime` code.
    fn field(&self, code: char, padded: bool) -> Option<String> {
        let number =
            |value: u64, width: usize| format!("{value:0width$}", width = if padded { width } else { 0 });
        let hour_of_12 = (self.hour + 11) % 12 + 1;
        Some(match code {
            'Y' => number(self.year, 4),
            'y' => number(self.year % 100, 2),
            'm' => number(self.month as u64 + 1, 2),
            'd' => number(self.day, 2),
            'j' => number(self.day_of_year, 3),
            'H' => number(self.hour, 2),
            'I' => number(hour_of_12, 2),
            'M' => number(self.minute, 2),
            'S' => number(self.second, 2),
            'B' => MONTHS[self.month].to_owned(),
            'b' => MONTHS[self.month][..3].to_owned(),
            'A' => DAYS[self.weekday].to_owned(),
            'a' => DAYS[self.weekday][..3].to_owned(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{:04}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of_year(year: u64) -> u64 {
    365 + u64::from(is_leap(year))
}

/// `month` counts from 0.
fn days_of_month(year: u64, month: usize) -> u64 {
    match month {
        1 => 28 + u64::from(is_leap(year)),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds))
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_782_400, "%a %F"), "Tue 2000-02-29");
        assert_eq!(at(1_735_689_599, "%d %b %Y, %I:%M %p, %j"), "31 Dec 2024, 11:59 PM, 366");
        assert_eq!(at(4_107_542_400, "%F %T"), "2100-03-01 00:00:00");
        assert_eq!(at(13_574_563_200, "%F"), "2400-02-29");
    }

    #[test]
    fn padding_can_be_omitted_and_unknown_codes_are_copied() {
        assert_eq!(at(0, "%-d/%-m/%y %-H"), "1/1/70 0");
        assert_eq!(at(0, "100%% %q %"), "100% %q %");
        assert_eq!(at(0, "%-"), "%-");
    }
}
