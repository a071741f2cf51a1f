//! Markup and style of the sheet.

/// Escapes text for HTML content and attributes.
pub(super) fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            other => out.push(other),
        }
        out
    })
}

/// `1.54 G`, `135 M`, `12`.
pub(super) fn si(count: u64) -> String {
    let units = [("T", 1_000_000_000_000_u64), ("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];
    match units.into_iter().find(|(_, unit)| count >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", count as f64 / unit as f64),
        None => count.to_string(),
    }
}

/// A table of cells that are markup already; columns from `numbers` on are right-aligned.
pub(super) fn table(head: &[&str], numbers: usize, rows: &[Vec<String>]) -> String {
    let class = |column: usize| if column >= numbers { " class=n" } else { "" };
    let cells = |tag: &str, row: &[String]| -> String {
        row.iter().enumerate().map(|(column, cell)| format!("<{tag}{}>{cell}</{tag}>", class(column))).collect()
    };
    let head: Vec<String> = head.iter().map(|title| (*title).to_owned()).collect();
    let body: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    format!("<div class=scroll><table><thead><tr>{}</tr></thead><tbody>{body}</tbody></table></div>", cells("th", &head))
}

/// The whole document.
pub(super) fn document(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>\n<title>{} · bundle sheet</title>\n<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n",
        escape(title)
    )
}

const STYLE: &str = "
:root{--ink:#1c2127;--soft:#5c6670;--line:#dfe3e8;--paper:#fff;--back:#f4f6f8;
--embed:#7a8793;--norm:#d9a514;--linear:#2f6fb5;--rope:#8457b0;--attend:#c8553d;--sample:#2e8b6b;--copy:#b0b7be}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);margin:0 auto;max-width:1280px;padding:24px}
header,section{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:18px 22px;margin-bottom:18px}
h1{margin:0;font-size:26px}h1 small{color:var(--soft);font-weight:400}
h2{margin:0 0 8px;font-size:18px}h3{margin:14px 0 4px;font-size:14px;font-weight:600}
p{margin:4px 0 10px;color:var(--soft)}
.seal{font-family:ui-monospace,monospace;font-size:12px;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr max-content 1fr;gap:2px 16px;margin:12px 0 0}
dt{color:var(--soft)}dd{margin:0}
.bar,.lane{display:flex;height:30px;border-radius:4px;overflow:hidden;background:var(--line)}
.bar i{min-width:2px}.lane i{min-width:1px;border-right:1px solid #fff6;flex-basis:0}
.lanes{display:grid;grid-template-columns:max-content 1fr max-content;gap:8px 14px;align-items:center}
.lanes span{white-space:nowrap}.lanes .total{color:var(--soft);font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:10px;color:var(--ink)}
.legend i,td i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.embed{background:var(--embed);fill:var(--embed)}.norm{background:var(--norm);fill:var(--norm)}
.linear{background:var(--linear);fill:var(--linear)}.rope{background:var(--rope);fill:var(--rope)}
.attend{background:var(--attend);fill:var(--attend)}.sample{background:var(--sample);fill:var(--sample)}
.copy{background:var(--copy);fill:var(--copy)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;color:var(--soft);font-weight:600;border-bottom:2px solid var(--line);padding:4px 10px 4px 0}
td{border-bottom:1px solid var(--line);padding:5px 10px 5px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{white-space:nowrap}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block;background:#fafbfc;border:1px solid var(--line);border-radius:4px}
svg text{font:11px system-ui,sans-serif;fill:var(--ink)}svg .axis{fill:var(--soft)}svg rect{stroke:#fff;stroke-width:.6}
svg text.in{fill:#fff;pointer-events:none}
summary{cursor:pointer;font-weight:600;font-size:14px;margin:8px 0}
@media(max-width:760px){dl{grid-template-columns:max-content 1fr}}
";
