"""A report on the sharing of rollouts: one page to read and explore, or pictures to print.

    ReportSubject --figures--> ReportFigures    --page--> HTML           in one file
                  --contents--> PageContents    --pictures--> PNG files

`parts` computes the sharing in each group and tree, `rollouts` their outcomes, `figures` the numbers of every chart,
and `words` the same in sentences. `contents` is the part that is read from texts: `roles` and `segments` of tokens,
`texts` of the nodes within a limit, and `causes` of lost sharing. `charts` makes specifications for Vega-Lite, and
`payload` the compressed columns that the explorer reads. `rebuilt` is the trie of a packed directory whose own
trie is missing.

The page itself is page.html and page.css, and in the order in which they need each other: data.js reads the columns,
colours.js has the colours, layout.js the lines of a tree, tree.js draws it, text.js shows its texts, list.js lists the
groups, and page.js starts all.
"""
