// Texts that models generate, or might.

/** Markdown, and pieces of the HTML that must come of it. */
export const TEXTS = [
  { text: 'plain', holds: ['<p>plain</p>'] },
  { text: 'one\ntwo\n\nthree', holds: ['<p>one<br>two</p><p>three</p>'] },
  { text: '# One\n## Two #\ntext\n### Three', holds: ['<h3 data-level="1">One</h3>', '<h4 data-level="2">Two</h4>', '<p>text</p>'] },
  { text: '#hashtag is no heading', holds: ['<p>#hashtag'] },
  { text: '**bold** and *italic* and ***both*** and _so_ and snake_case_name', holds: ['<strong>bold</strong>', '<em>italic</em>', '<strong><em>both</em></strong>', '<em>so</em>', 'snake_case_name'] },
  { text: '**标题：**文本 and 2 * 3 * 4', holds: ['<strong>标题：</strong>文本', '2 * 3 * 4'] },
  { text: 'an *open end', holds: ['<p>an *open end</p>'] },
  { text: '~~gone~~ and ~not~', holds: ['<del>gone</del> and ~not~'] },
  { text: 'code `a*b*c` and ``x ` y`` and `open', holds: ['<code>a*b*c</code>', '<code>x ` y</code>', '`open'] },
  { text: '- a\n- b\n  - c\n    - d\n- e', holds: ['<li>b<ul><li>c<ul><li>d</li></ul></li></ul></li>', '<li>e</li>'] },
  { text: '1. one\n2. two\n   - inner\n\n   more of two\n3. three', holds: ['<ol>', '<ul><li>inner</li></ul>', '<p>more of two</p>'] },
  { text: '3. three\n4. four', holds: ['<ol start="3">'] },
  { text: '1. code:\n   ```js\n   let a = 1;\n   ```\n2. next', holds: ['<code>let a = 1;\n</code>', '<li>next</li>'] },
  { text: '- [ ] to do\n- [x] done', holds: ['<li class="task"><input type="checkbox" disabled="">'] },
  { text: 'before\n- item right after\n\nafter', holds: ['<p>before</p><ul><li>item right after</li></ul><p>after</p>'] },
  { text: '> quoted\n> > twice\nlazy\n\nfree', holds: ['<blockquote><p>quoted</p><blockquote>', '<p>free</p>'] },
  { text: '```python\nif a < b:\n    print("`")\n```\nafter', holds: ['<span>python</span>', 'if a &lt; b:\n    print("`")', '<p>after</p>'] },
  { text: '~~~\n```\nstill code\n```\n~~~', holds: ['```\nstill code\n```'] },
  { text: '````\n```\ninner\n```\n````\n', holds: ['```\ninner\n```'] },
  { text: 'text\n```\nnever closed\n', holds: ['<p>text</p>', 'never closed'] },
  { text: '| a | b |\n|---|:-:|\n| 1 | `x|y` |\n| 2 | p \\| q |\n\nafter', holds: ['<th>a</th>', '<td style="text-align: center;"><code>x|y</code></td>', 'p | q', '<p>after</p>'] },
  { text: 'a | b\n--|--\n1 | **2**', holds: ['<td><strong>2</strong></td>'] },
  { text: 'no | table\nhere', holds: ['<p>no | table<br>here</p>'] },
  { text: '---\n\n***\n- - -', holds: ['<hr><hr><hr>'] },
  { text: '[a](https://a.example/x_(y) "title") and <https://b.example> and https://c.example/d. End', holds: ['href="https://a.example/x_(y)"', 'href="https://b.example/"', 'href="https://c.example/d"', '</a>. End'] },
  { text: '[bad](javascript:alert(1)) [data](data:text/html,x) [rel](/page/app.js)', holds: ['[bad](javascript:alert(1))', '[data](data:text/html,x)', '[rel](/page/app.js)'] },
  { text: '![a picture](https://a.example/b.png)', holds: ['<a href="https://a.example/b.png"', '>a picture</a>'] },
  { text: '[[nested](https://a.example)](https://b.example)', holds: ['nested'] },
  { text: 'escaped \\*stars\\* and \\`ticks\\`', holds: ['escaped *stars* and `ticks`'] },
  { text: 'cell<br>break and <b>no tag</b>', holds: ['cell<br>break and &lt;b&gt;no tag&lt;/b&gt;'] },
  { text: '```\nwindows\r\nlines\r\n```\r\nafter\r\n', holds: ['<p>after</p>'] },
  { text: '\n\n  \n', holds: [''] },
  {
    name: 'everything',
    text: `A **forebay** is the pool just before the turbines, where water waits until the gates open. Three things decide how much of it is ready:

1. The *level*: how much of the pool is filled.
2. The inflow, which is
   - steady in spring,
   - and \`low\` in autumn.
3. The gates.

## Head and flow

The power of a plant is the product of head and flow:

\`\`\`python
def power(head: float, flow: float, efficiency: float = 0.9) -> float:
    """Watts, from metres and cubic metres per second."""
    return 1000 * 9.81 * head * flow * efficiency
\`\`\`

| Plant | Head | Flow | Power | What it is for |
|:------|-----:|-----:|------:|:---------------|
| Upper | 120 m | 8 m³/s | 8.5 MW | peaks in the evening |
| Lower | 35 m | 40 m³/s | 12.4 MW | the base load, all year |

> Nothing is wasted that waits at the right place.

See [the handbook](https://example.org/forebay) for more.
`,
    holds: ['<strong>forebay</strong>'],
  },
];

/** What must do nothing. */
export const HOSTILE = `<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1">

<svg onload="window.hacked = 1"></svg> <iframe src="https://evil.example"></iframe>

[click](javascript:window.hacked=1) [click](JaVaScRiPt:window.hacked=1) [click](  javascript:window.hacked=1 )
[click](vbscript:x) [click](data:text/html;base64,PHNjcmlwdD4=) <javascript:window.hacked=1>
[x](https://a.example" onclick="window.hacked=1) [y](https://a.example '" onmouseover=x)

![pic](https://evil.example/track.png) ![pic](javascript:window.hacked=1)

| <img src=x onerror="window.hacked = 1"> | b |
|---|---|
| <table><tr><td onclick="window.hacked=1">| nested \\| cell</td></tr></table> | <style>*{display:none}</style> |
| [l](javascript:1) | **<b onclick=x>bold</b>** |

> - <a href="javascript:window.hacked=1">link</a>
>   1. <details open ontoggle="window.hacked=1">

\`\`\`html"><script>window.hacked=1</script>
</code></pre><img src=x onerror="window.hacked = 1">
\`\`\`

# <img src=x onerror="window.hacked = 1">

\`<img src=x onerror=window.hacked=1>\` <a href=https://fine.example>x</a> https://fine.example/"onmouseover="window.hacked=1
`;
