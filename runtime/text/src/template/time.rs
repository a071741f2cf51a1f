//! The time that `strftime_now` answers: a parameter, in UTC, so that a prompt is a function of its inputs.

/// A second in UTC, proleptic Gregorian.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct UtcTime {
    days: i64,
    second_of_day: u32,
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl UtcTime {
    /// 1970-01-01 00:00:00.
    pub const EPOCH: Self = Self { days: 0, second_of_day: 0 };

    /// From seconds since the epoch.
    pub fn from_unix_seconds(seconds: i64) -> Self {
        Self { days: seconds.div_euclid(86_400), second_of_day: seconds.rem_euclid(86_400) as u32 }
    }

    /// Year, month (1–12) and day (1–31). Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
    fn date(self) -> (i64, u32, u32) {
        let shifted = self.days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_shifted = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * month_shifted + 2) / 5 + 1) as u32;
        let month = if month_shifted < 10 { month_shifted + 3 } else { month_shifted - 9 } as u32;
        (year_of_era + era * 400 + i64::from(month <= 2), month, day)
    }

    fn day_of_year(self) -> i64 {
        let (year, _, _) = self.date();
        let before = year - 1;
        let new_year = before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162;
        self.days - new_year + 1
    }

    /// As Python's `strftime` in the C locale.
    pub fn format(self, pattern: &str) -> String {
        let mut out = String::new();
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            match c {
                '%' => self.directive(&mut chars, &mut out),
                other => out.push(other),
            }
        }
        out
    }

    fn directive(self, chars: &mut std::str::Chars<'_>, out: &mut String) {
        match chars.next() {
            Some('-') => {
                let mut padded = String::new();
                self.directive(chars, &mut padded);
                let bare = padded.trim_start_matches(['0', ' ']);
                out.push_str(if bare.is_empty() { "0" } else { bare });
            }
            Some(code) => match self.field(code) {
                Some(text) => out.push_str(&text),
                None => out.extend(['%', code]),
            },
            None => out.push('%'),
        }
    }

    fn field(self, code: char) -> Option<String> {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let month_name = MONTHS[month as usize - 1];
        let weekday = WEEKDAYS[(self.days + 3).rem_euclid(7) as usize];
        let twelve = (hour + 11) % 12 + 1;
        Some(match code {
            'Y' => format!("{year:04}"),
            'y' => format!("{:02}", year.rem_euclid(100)),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => month_name.into(),
            'b' | 'h' => month_name[..3].into(),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'u' => (self.days + 3).rem_euclid(7).saturating_add(1).to_string(),
            'w' => (self.days + 4).rem_euclid(7).to_string(),
            'j' => format!("{:03}", self.day_of_year()),
            'H' => format!("{hour:02}"),
            'I' => format!("{twelve:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => "000000".into(),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{year:04}-{month:02}-{day:02}"),
            'D' | 'x' => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'R' => format!("{hour:02}:{minute:02}"),
            'c' => format!("{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year:04}", &weekday[..3], &month_name[..3]),
            'z' | 'Z' => String::new(),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_python_s() {
        let leap = UtcTime::from_unix_seconds(1_709_211_909);
        assert_eq!(leap.format("%d %b %Y|%A %j|%I:%M %p|%-d %-m|%Q%%"), "29 Feb 2024|Thursday 060|01:05 PM|29 2|%Q%");
        assert_eq!(UtcTime::EPOCH.format("%c %y %j"), "Thu Jan  1 00:00:00 1970 70 001");
        assert_eq!(UtcTime::from_unix_seconds(-1).format("%F %T"), "1969-12-31 23:59:59");
        assert_eq!(UtcTime::from_unix_seconds(1_767_225_599).format("%F %j"), "2025-12-31 365");
    }
}
