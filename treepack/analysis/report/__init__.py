"""A report on what rollouts share: one page to read and explore, or pictures to print.

    Subject --figures--> Figures --page, with texts--> HTML        in one file
                                 --pictures--> PNG files

`parts` has what each group and tree shares, `figures` the numbers behind every chart, `words` the same in sentences,
`charts` the specifications for Vega-Lite, `texts` the text of the nodes within a limit, `payload` the columns that the
explorer reads, compressed, `outline` where a drawn tree's nodes stand, and `rebuilt` the trie of a packed directory
that has lost its own. The page itself is page.html, page.css, data.js, tree.js and page.js.
"""
